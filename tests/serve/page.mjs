// What a person does with the page, against a scripted model: see test_serve_page.py.
import { readFile } from "node:fs/promises";
import { accessible, ask, assert, context, end, folder, idle, last, open, said, send, setting, shot } from "./browser.mjs";
const page = await open();
const titles = (tab = page) => tab.locator("#list li button:first-child").allTextContents();
const press = (name) => last(page).getByRole("button", { name, exact: true }).click();
const fresh = () => page.keyboard.press("Control+k");

async function chats() {
  await ask(page, "What is 37 plus 48?");
  assert.equal(await said(page), "It is 85.");
  assert.match(await last(page).locator(".foot").textContent(), /tok\/s · \d+\.\d tokens per step/);
  await press("Steps");
  const colors = (node) => new Set([...node.querySelectorAll(".text:not([hidden]) span")].map((one) => getComputedStyle(one).backgroundColor)).size;
  assert.equal(await last(page).evaluate(colors), 3);
  await press("Copy");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "It is 85.");
  await fresh();
  await send(page, "Wait for ever.");
  await page.locator(".assistant .text span").first().waitFor();
  assert.ok(await page.isDisabled("#send"));
  await page.click("#list li:last-child button"); // another conversation, meanwhile
  assert.equal(await said(page), "It is 85.");
  await ask(page, "And now?");
  await page.click("#list li:first-child button");
  await page.keyboard.press("Escape");
  await last(page).getByText("Stopped.").waitFor();
  await send(page, "Wait, and Show Markdown.");
  await page.locator("[aria-busy] .markdown .nf").waitFor(); // what is finished of it, already
  await page.click("#stop");
  await last(page).getByText("Stopped.").waitFor();
  assert.equal(await page.locator("#list li").count(), 2);
  await page.reload();
  await last(page).getByText("Sums").waitFor();
  assert.equal(await page.locator("#list li").count(), 2);
}

async function markdown() {
  await fresh();
  await ask(page, "Show Markdown.");
  const answer = last(page).locator(".markdown");
  for (const one of ["h1", "ol li", "td", "pre .k", "em", "blockquote"]) assert.ok(await answer.locator(one).count(), one);
  await answer.locator(".block").first().getByRole("button").click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "def f(x):\n    return x  # the same\n");
  await shot(page, "markdown");
  await accessible(page);
  await fresh();
  await ask(page, "Be hostile.");
  const hostile = "#turns :is(a, img, script, iframe, form, svg, style, link, [onerror], [onload], [href], [src], [style])";
  assert.equal(await page.locator(hostile).count(), 0);
  for (const one of await answer.locator(".link, .address, span").all()) await one.click({ timeout: 1000 });
  assert.equal(await page.evaluate(() => window.hacked), undefined);
  assert.match(await said(page), /<script>.*\[image: nice\] http:\/\/evil.test\/i.png/s);
  await shot(page, "hostile");
}

async function versions() {
  await fresh();
  await ask(page, "Count.");
  assert.equal(await said(page), "Answer 1.");
  await press("Regenerate");
  await last(page).getByText("Answer 2.").waitFor();
  await ask(page, "Go on.");
  await page.click(".turn >> nth=1 >> [aria-label='Previous version']");
  assert.equal(await said(page), "Answer 1.");
  assert.equal(await page.locator(".turn").count(), 2);
  await page.click("[aria-label='Next version']");
  assert.equal(await page.locator(".turn").count(), 4);
  await page.locator(".turn >> nth=0").getByText("Edit").click();
  await page.keyboard.press("Escape");
  await page.click("[aria-label='Previous version']");
  await page.press("#input", "ArrowUp");
  await page.keyboard.type(" Again: count.");
  await page.keyboard.press("Enter");
  await last(page).getByText("Answer 1.").waitFor();
  assert.equal(await page.locator(".turn").count(), 2);
  await page.locator(".turn >> nth=0").getByText("2/2").waitFor();
  await press("Branch");
  await ask(page, "Elsewhere?");
  assert.deepEqual((await titles()).slice(0, 2), ["Count.", "Count."]);
  await page.keyboard.press("Alt+ArrowDown");
  assert.equal(await page.locator(".turn").count(), 2);
}

async function thoughtsAndCalls() {
  await fresh();
  await ask(page, "Think.");
  assert.ok(!await page.isVisible(".thought .text"));
  await page.click(".thought summary");
  assert.equal((await page.textContent(".thought .text")).trim(), "Let me see.");
  assert.equal(await said(page), "Yes.");
  await fresh();
  await setting(page, "tools", "not JSON");
  await setting(page, "tools", '[{"type": "function", "function": {"name": "weather"}}]');
  await ask(page, "Call.");
  assert.match(await page.textContent(".call"), /weather.*"city": "Bern"/s);
  await shot(page, "call");
  await accessible(page);
  await page.fill(".call textarea", "14 degrees");
  await page.click("text=Return");
  await last(page).getByText("14 degrees, as told.").waitFor();
}

async function limitsAndErrors() {
  await fresh();
  await setting(page, "system", "Be brief.");
  await ask(page, "Be cut.");
  await last(page).getByText("The limit of tokens cut this answer off.").waitFor();
  await press("Go on");
  await last(page).getByText("One, two, three.").waitFor();
  assert.equal(await page.getByText("cut this answer off").count(), 0);
  await send(page, "word ".repeat(3000));
  await last(page, "user").getByText(/maximum context length/).waitFor();
  assert.ok(await last(page, "user").locator(".error").isVisible());
  await shot(page, "too-long");
  await ask(page, "And a short one?");
  assert.equal(await said(page), "It is 85.");
  await page.getByText("2/2").waitFor();
  await send(page, "Fail.");
  await last(page, "user").getByText(/boom/).waitFor();
  await last(page, "user").getByText("Try again").click();
  await last(page, "user").getByText(/boom/).waitFor();
}

async function races() {
  await fresh();
  await setting(page, "temperature", "0.7");
  await ask(page, "Race?");
  await press("Race");
  await page.getByText(/^2.00× plain: .* measured in turns; the same text/).first().waitFor();
  await shot(page, "race");
  const told = await page.evaluate(() => [[0.1, 5, 2], [9, 1, 2], [1, 0.9, 2, true], [3, 2, 4]].map(([slow, fast, perStep, others]) => {
    const side = (seconds) => ({ times: [0, 1], turn: { content: "a", reasoning: "" }, speed: { tokens: 101, steps: 9, perStep, seconds } });
    return verdict(side(fast), side(slow), others);
  }));
  assert.match(told[0], /^No figure: 0.10 s .* too short/);
  assert.match(told[1], /^No figure: something else ran/); // 9 times as fast with 2 tokens a step
  assert.match(told[2], /^No figure: something else ran/);
  assert.match(told[3], /^1.50× plain/);
  const uneven = await page.evaluate(() => [isEven([0, 100, 200, 300, 400]), isEven([0, 100, 200, 300, 900])]);
  assert.deepEqual(uneven, [true, false]);
}

async function models() {
  await fresh();
  await page.selectOption("#model", { label: "other (not loaded)" });
  await ask(page, "Who are you?");
  assert.equal(await said(page), "Hello world");
  await page.locator("#model option", { hasText: /^other$/ }).waitFor({ state: "attached" });
  await page.keyboard.press("Alt+ArrowDown");
  assert.equal(await page.inputValue("#model"), "fake");
}

async function files() {
  await page.keyboard.press("Tab");
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press("/");
  await page.keyboard.type("14 DEGREES");
  assert.deepEqual(await titles(), ["Call."]);
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
  await download.saveAs(`${folder}/exported.json`);
  const { conversations: [one] } = JSON.parse(await readFile(`${folder}/exported.json`));
  assert.equal(one.turns[1].calls[0].name, "weather");
  const content = { conversations: [one, { title: 1 }, { title: "x", turns: [{ role: "user", content: "a", parent: 7 }] }] };
  const upload = (text) => page.setInputFiles("#file", { name: "some.json", mimeType: "application/json", buffer: Buffer.from(text) });
  await upload(JSON.stringify(content));
  await page.waitForFunction(() => document.querySelectorAll("#list li").length === 2);
  await upload("nothing");
  await page.getByText("There are no conversations in some.json.").waitFor();
  await page.click("#list li:first-child [aria-label^=Delete]");
  await page.waitForFunction(() => document.querySelectorAll("#list li").length === 1);
  await page.fill("#search", "");
}

async function looks() {
  await page.getByText("Show Markdown.").first().click();
  for (const theme of ["light", "dark"]) {
    await setting(page, "theme", theme);
    for (const width of [1100, 360]) {
      await page.setViewportSize({ width, height: 760 });
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
      await shot(page, `${theme}-${width}`);
      await accessible(page);
      await page.click("#open-settings");
      await shot(page, `${theme}-${width}-settings`);
      await accessible(page);
      await page.click("#close-settings");
    }
    await page.click("#menu");
    await shot(page, `${theme}-menu`);
    await accessible(page);
    await page.setViewportSize({ width: 1100, height: 760 });
  }
  assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), "rgb(24, 24, 26)");
  await setting(page, "theme", "");
}

// Two tabs: each has a conversation, and both go on with the same one at the same time.
async function tabs() {
  const [one, two] = [await open(), await open()];
  const count = await one.locator("#list li").count();
  const kept = (tab, more) => tab.waitForFunction((all) => document.querySelectorAll("#list li").length === all
    && !document.getElementById("send").disabled, count + more);
  for (const tab of [one, two]) await tab.click("#new");
  await ask(one, "tab one asks");
  await ask(two, "tab two asks");
  await kept(one, 2);
  assert.deepEqual((await titles(one)).slice(0, 2).sort(), ["tab one asks", "tab two asks"]);
  await one.click("text=tab two asks");
  await Promise.all([ask(one, "one goes on"), ask(two, "two goes on")]);
  for (const tab of [one, two]) await kept(tab, 3);
  await one.reload();
  await kept(one, 3);
  assert.equal((await titles(one)).filter((title) => title === "tab two asks").length, 2);
  return [one, two, kept];
}

// Storage that is full, and records that other programs, or older pages, have left.
async function storage([one, two, kept]) {
  await one.evaluate(() => {
    IDBObjectStore.prototype.put = () => { throw new DOMException("it is full", "QuotaExceededError"); };
  });
  await one.click("#new");
  await ask(one, "not kept");
  await one.getByText(/cannot keep conversations \(it is full\)/).waitFor();
  assert.equal((await titles(one))[0], "not kept");
  await two.evaluate(() => new Promise((resolve) => {
    localStorage.settings = '{"theme": {"a": 1}, "color": null}';
    localStorage.defaults = "[]";
    indexedDB.open("dflash-mlx").onsuccess = ({ target }) => {
      const change = target.result.transaction("chats", "readwrite");
      const turns = [{ role: "user", content: "Old" }, { role: "assistant", content: "Sound", speed: { perSecond: "x" }, plain: {} }];
      for (const [id, damaged] of [{}, { turns: [null] }, { title: 1, turns }, { title: "t", turns: {} },
        { title: "Sound", turns }].entries()) change.objectStore("chats").put({ id, ...damaged });
      change.oncomplete = resolve;
    };
  }));
  await two.reload();
  await kept(two, 4);
  await two.click("text=Sound");
  await ask(two, "And now?");
  assert.equal(await said(two), "It is 85.");
  assert.equal(await two.locator(".turn").count(), 4);
}

for (const part of [chats, markdown, versions, thoughtsAndCalls, limitsAndErrors, races, models, files, looks]) await part();
await storage(await tabs());
await context.close();
await end();
