// What an answer shows before its first word, on stand-ins for the browser's elements.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import vm from "node:vm";

class Element {
  children = [];
  hidden = false;
  dataset = {};
  classList = { toggle() {} };
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
}
const models = new Element();
models.options = [
  { value: "here", dataset: { state: "loaded" } },
  { value: "there", dataset: { state: "not-loaded" } },
];
const page = vm.createContext({ $: () => models, document: { createElement: () => new Element() } });
for (const file of process.argv.slice(2)) vm.runInContext(await readFile(file, "utf8"), page);
const run = (code) => vm.runInContext(code, page);

assert.equal(run("waitsFor('here')"), "Reading your message…");
assert.equal(run("waitsFor('there')"), "Loading there…");
assert.equal(run("waitsFor('gone')"), "Reading your message…");
for (const comes of ["view.add('Hi', 1, null)", "view.reason('Hm')"]) {
  run("var view = new AnswerView({ reasoning: '', content: '', steps: [] }, waitsFor('there'))");
  assert.equal(run("view.waits.textContent"), "Loading there…");
  assert.equal(run("view.waits.hidden"), false);
  run(comes);
  assert.equal(run("view.waits.hidden"), true);
}
assert.equal(run("new AnswerView({ reasoning: '', content: 'Old.' }).waits.hidden"), true);
