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
page.on("pageerror", (error) => seen.errors.push(String(error)));
page.on("request", (one) => {
  if (!one.url().startsWith(url) && !one.url().startsWith("data:")) seen.foreign.push(one.url());
});
const named = () => page.waitForFunction(() => document.getElementById("model").textContent);
const idle = () => page.waitForSelector("#stop", { state: "hidden" });
const shot = (name) => page.screenshot({ path: `${folder}/${name}.png` });
const ask = async (question) => {
  await page.keyboard.type(question);
  await page.keyboard.press("Enter");
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
await browser.close();
console.log(JSON.stringify(seen));
