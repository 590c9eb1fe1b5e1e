// A person at the page, in Chromium: `node TEST.mjs URL CHROMIUM FOLDER`. NODE_PATH says where
// playwright-core and axe-core are. Nothing may fail on the console, or be loaded from elsewhere.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
const require = createRequire(import.meta.url);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf-8");

const [url, executablePath, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const context = await browser.newContext({ viewport: { width: 1100, height: 760 }, colorScheme: "light" });
context.setDefaultTimeout(15000);
await context.grantPermissions(["clipboard-read", "clipboard-write"]);
const bad = [], refused = /status of (400|500)/; // which Chromium tells of every request
context.on("console", (one) => {
  if (["error", "warning"].includes(one.type()) && !refused.test(one.text())) bad.push(one.text());
});
context.on("weberror", (one) => bad.push(String(one.error())));
context.on("request", (one) => {
  if (!/^(data|blob):/.test(one.url()) && !one.url().startsWith(url)) bad.push(one.url());
});

export { assert, context, folder };
export async function open() {
  const tab = await context.newPage();
  tab.on("dialog", (dialog) => dialog.accept());
  await tab.goto(url);
  await tab.waitForFunction(() => document.querySelector("#model").value);
  return tab;
}
export const idle = (tab) => tab.waitForFunction(() => document.querySelector("#stop").hidden);
export const last = (tab, kind = "assistant") => tab.locator(`.turn.${kind}`).last();
export const said = async (tab) => (await last(tab).locator(".markdown").textContent()).trim();
export async function send(tab, question) {
  await tab.fill("#input", question);
  await tab.press("#input", "Enter");
}
export async function ask(tab, question) {
  await send(tab, question);
  await last(tab).locator(".foot").waitFor();
  await idle(tab);
}
export async function setting(tab, name, value) {
  await tab.click("#open-settings");
  const field = tab.locator(`[name=${name}]`);
  await (await field.evaluate((one) => one.tagName) === "SELECT" ? field.selectOption(value) : field.fill(value));
  await tab.click("#close-settings");
}
export const shot = (tab, name) => tab.screenshot({ path: `${folder}/${name}.png` });
export async function accessible(tab) {
  const found = await tab.evaluate(`${axe}; axe.run()`);
  assert.deepEqual(found.violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html)]), []);
}
export async function end() {
  await browser.close();
  assert.deepEqual(bad, []);
}
