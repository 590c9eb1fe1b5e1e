// How an answer looks: its thought folded, finished blocks as Markdown, and the last one as the text
// that comes, in a color for each decode step.
function make(tag, kind = "", content = "") {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (content) node.textContent = content;
  return node;
}

function button(label, act, about = "") {
  const node = make("button", "", label);
  node.type = "button";
  if (about) node.title = about;
  node.onclick = act;
  return node;
}

// Ends of Markdown's blocks: blank lines outside of code, before a line that is not indented.
function blocksEnd(content, from) {
  let end = from, at = from, fence = "";
  for (const line of content.slice(from).split("\n").slice(0, -1)) {
    at += line.length + 1;
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (!fence) fence = mark ?? "";
    else if (mark?.startsWith(fence) && line.trim() === mark) fence = "";
    if (!fence && !line.trim() && /\S/.test(content[at] ?? "")) end = at;
  }
  return { end, inCode: Boolean(fence) };
}

// The server's HTML as nodes, with what it cannot say: buttons, and regions that keys can scroll.
function nodesOf(told) {
  const holder = make("template");
  holder.innerHTML = told;
  for (const pre of holder.content.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const block = make("div", "block"), head = make("header");
    head.append(make("span", "", code.className.replace("language-", "")),
      button("Copy", (event) => copy(code.textContent, event.target), "Copy the code"));
    pre.replaceWith(block);
    pre.tabIndex = 0;
    block.append(head, pre);
  }
  for (const table of holder.content.querySelectorAll("table")) {
    const scroll = make("div", "scroll");
    scroll.tabIndex = 0;
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return holder.content;
}

async function copy(content, from) {
  if (navigator.clipboard) await navigator.clipboard.writeText(content);
  else { // the page did not come over HTTPS, nor from this machine
    const field = Object.assign(make("textarea"), { value: content });
    from.after(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}

class AnswerView {
  constructor(turn, waitsFor = "") {
    this.turn = turn;
    this.done = 0; // characters that are Markdown
    this.node = make("div");
    this.thought = make("details", "thought");
    this.thought.append(make("summary", "", "Thought"), make("div", "text", turn.reasoning));
    this.thought.hidden = !turn.reasoning;
    this.markdown = make("div", "markdown");
    this.tail = make("div", "text");
    this.waits = make("p", "dim", waitsFor);
    this.waits.hidden = !waitsFor;
    this.node.append(this.thought, this.markdown, this.tail, this.waits);
    this.drawTail(0);
  }

  reason(thought) {
    this.waits.hidden = true;
    this.thought.hidden = false;
    this.thought.firstChild.textContent = "Thinking…";
    this.thought.lastChild.textContent = thought;
  }

  add(content, number, step) {
    this.waits.hidden = true;
    const about = step?.tokens ? `${step.tokens} tokens, ${step.accepted} of ${step.drafted} drafted tokens accepted` : "";
    this.turn.steps.push({ content, color: `c${number % 5}`, about });
    this.thought.firstChild.textContent = "Thought";
    this.drawStep(this.turn.steps.at(-1), content);
    if (content.includes("\n")) this.settle();
  }

  drawStep({ color, about }, content) {
    const span = make("span", color, content);
    if (about) span.title = about;
    this.tail.append(span);
  }

  drawTail(from) {
    let at = 0;
    this.tail.replaceChildren();
    for (const step of this.turn.steps ?? [{ content: this.turn.content }]) {
      const start = Math.max(0, from - at);
      if (start < step.content.length) this.drawStep(step, step.content.slice(start));
      at += step.content.length;
    }
  }

  async settle() {
    const { content } = this.turn;
    const { end, inCode } = blocksEnd(content, this.done);
    this.tail.classList.toggle("code", inCode);
    if (end === this.done || this.settling) return;
    this.settling = true;
    const told = await rendered(content.slice(this.done, end));
    this.settling = told === null; // then the rest stays text
    if (told === null || this.finished) return;
    this.markdown.append(nodesOf(told));
    this.done = end;
    this.drawTail(end);
    this.settle(); // more has come meanwhile
  }

  // All of it at once: lists and references may reach across blank lines.
  async finish() {
    this.finished = true;
    const told = this.turn.content ? await rendered(this.turn.content) : null;
    this.tail.classList.remove("code");
    if (told === null) return;
    this.markdown.replaceChildren(nodesOf(told));
    this.tail.replaceChildren();
    this.tail.hidden = true;
  }

  // Markdown, or the text in steps.
  toggle() {
    this.markdown.hidden = this.tail.hidden;
    this.tail.hidden = !this.tail.hidden;
    if (!this.tail.hidden) this.drawTail(0);
  }
}
