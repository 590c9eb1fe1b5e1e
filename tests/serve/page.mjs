// What a person does with the page, in Chromium; prints what was seen as JSON.
//
//     node page.mjs URL CHROMIUM FOLDER    (NODE_PATH says where playwright-core is)
import { createRequire } from "node:module";
const { chromium } = createRequire(import.meta.url)("playwright-core");

const [url, executablePath, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const context = await browser.newContext({ viewport: { width: 1100, height: 700 }, colorScheme: "light" });
const page = await context.newPage();
const seen = { errors: [], foreign: [] };
page.on("console", (one) => { if (["error", "warning"].includes(one.type())) seen.errors.push(one.text()); });
context.on("weberror", (one) => seen.errors.push(String(one.error())));
page.on("request", (one) => {
  if (!one.url().startsWith(url) && !one.url().startsWith("data:")) seen.foreign.push(one.url());
});
const named = () => page.waitForFunction(() => document.getElementById("model").textContent);
const idle = () => page.waitForSelector("#stop", { state: "hidden" });
const shot = (name) => page.screenshot({ path: `${folder}/${name}.png` });
const ask = async (question, tab = page) => {
  await tab.fill("#input", question);
  await tab.press("#input", "Enter");
};

await page.goto(url);
await named();
await ask("What is 37 plus 48?");
await page.waitForSelector(".assistant .foot");
seen.answer = await page.textContent(".assistant .text");
seen.rounds = await page.locator(".assistant .text span").count();
seen.colors = await page.evaluate(() => new Set([...document.querySelectorAll(".assistant .text span")]
  .map((one) => getComputedStyle(one).backgroundColor)).size);
seen.speed = await page.textContent(".foot");
await page.click("text=Race");
await page.waitForSelector(".race strong");
seen.race = await page.textContent(".race strong");
await shot("race");
await page.keyboard.press("Control+k");
await ask("Wait for ever.");
await page.waitForSelector(".assistant .text span");
seen.sending = await page.isDisabled("#send");
await page.keyboard.press("Escape");
await idle();
seen.conversations = await page.locator("#list li").count();
await page.reload();
await named();
seen.reloaded = [await page.locator("#list li").count(), await page.locator(".turn").count()];
await page.click("#open-settings");
await page.check("#s-dark");
await page.fill("#s-max", "64");
await shot("settings");
await page.click("#close-settings");
seen.dark = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
await page.setViewportSize({ width: 380, height: 700 });
await shot("narrow");
seen.width = await page.evaluate(() => document.documentElement.scrollWidth);
await page.click("#menu");
seen.menu = await page.isVisible("#nav");

// Two tabs: each has a conversation, and both go on with the same one at the same time.
const titles = (tab) => tab.locator("#list li button:first-child").allTextContents();
const kept = (tab, count) => tab.waitForFunction((count) =>
  document.querySelectorAll("#list li").length === count && !document.getElementById("send").disabled, count);
const [one, two] = [await context.newPage(), await context.newPage()];
for (const tab of [one, two]) { await tab.goto(url); await tab.click("#new"); }
await ask("tab one asks", one);
await one.waitForSelector(".assistant .foot");
await ask("tab two asks", two);
await two.waitForSelector(".assistant .foot");
await kept(one, 4);
seen.both = (await titles(one)).slice(0, 2).sort();
await one.click("text=tab two asks");
await Promise.all([ask("one goes on", one), ask("two goes on", two)]);
for (const tab of [one, two]) await kept(tab, 5);
await one.reload();
await kept(one, 5);
seen.forked = (await titles(one)).filter((title) => title === "tab two asks").length;

// Storage that is full, and records that other programs have damaged.
await one.evaluate(() => {
  IDBObjectStore.prototype.put = () => { throw new DOMException("it is full", "QuotaExceededError"); };
});
await one.click("#new");
await ask("not kept", one);
await one.waitForSelector("#unkept:not([hidden])");
seen.unkept = await one.textContent("#unkept");
seen.still = (await titles(one))[0];
await two.evaluate(() => new Promise((resolve) => {
  localStorage.settings = '{"system": {"a": 1}, "temperature": null}';
  indexedDB.open("dflash-mlx").onsuccess = ({ target }) => {
    const change = target.result.transaction("chats", "readwrite");
    const turns = [{ role: "assistant", content: "Sound", speed: { perSecond: "x" }, plain: {} }];
    for (const [id, damaged] of [{}, { turns: [null] }, { title: 1, turns }, { title: "t", turns: {} },
      { title: "Sound", turns }].entries()) change.objectStore("chats").put({ id, ...damaged });
    change.oncomplete = resolve;
  };
}));
await two.reload();
await kept(two, 6);
await two.click("text=Sound");
await ask("And now?", two);
await two.waitForSelector(".assistant .foot span");
seen.damaged = await two.textContent(".turn:last-child .text");
await browser.close();
console.log(JSON.stringify(seen));
