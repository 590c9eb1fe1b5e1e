// The page with the embedded pair: what it really says, cut off and gone on with, raced and stopped.
import { ask, assert, end, idle, last, open, said, send, setting, shot } from "./browser.mjs";
const page = await open();
const press = (name) => last(page).getByRole("button", { name, exact: true }).click();

await ask(page, "What is 37 plus 48?");
const whole = await said(page);
assert.match(whole, /85/);
await press("Regenerate");
await page.locator(".assistant").getByText("2/2").waitFor();
assert.equal(await said(page), whole);
await press("Race");
await page.locator(".race").getByText(/the same text/).waitFor();
await shot(page, "tiny-race");

await page.click("#new");
await setting(page, "max_tokens", "8");
await ask(page, "What is 37 plus 48?");
await last(page).getByText("cut this answer off").waitFor();
const cut = await said(page);
assert.ok(whole.startsWith(cut) && cut.length < whole.length);
await setting(page, "max_tokens", "200");
await press("Go on");
await last(page).getByText("So 37").waitFor();
await idle(page);
assert.equal(await said(page), whole);

await send(page, "What is 37 plus 48? ".repeat(2000));
await last(page, "user").getByText(/maximum context length/).waitFor();
await ask(page, "What is 12 plus 9?");
assert.match(await said(page), /21/);
await shot(page, "tiny");
await end();
