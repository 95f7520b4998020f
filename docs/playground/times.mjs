// How long the page takes: from opening it in a fresh browser until the compiler has checked the policy, and from a key to the
// compiler's answer, before any policy has run and while one does. Milliseconds, as JSON.
//
//   node times.mjs CHROMIUM ADDRESS

import core from "playwright-core";

const [chromium, address] = process.argv.slice(2);
const TEXT = "# a note that is typed";

async function opened() {
  const browser = await core.chromium.launch({ executablePath: chromium, args: ["--no-sandbox"] });
  const page = await browser.newPage({ viewport: { width: 1280, height: 860 } });
  const began = Date.now();
  await page.goto(address);
  await page.waitForSelector("body[data-checked]", { timeout: 180_000 });
  return { browser, page, took: Date.now() - began };
}

/** Times of keys, one after the other, at the end of the text. */
async function typed(page) {
  const times = [];
  await page.click("#editor .cm-content");
  await page.keyboard.press("Control+End");
  for (const key of TEXT) {
    const before = Number(await page.getAttribute("body", "data-checked"));
    const began = Date.now();
    await page.keyboard.type(key);
    await page.waitForFunction((old) => Number(document.body.dataset.checked) > old, before);
    times.push(Date.now() - began);
    await page.waitForTimeout(120);
  }
  return times.sort((one, other) => one - other);
}

const loads = [];
for (let count = 0; count < 4; count++) {
  const { browser, took } = await opened();
  loads.push(took);
  await browser.close();
}
const { browser, page, took } = await opened();
loads.push(took);
const keys = await typed(page);
await page.click("#tab-stays");
const keys_while_a_policy_runs = await typed(page);
console.log(JSON.stringify({ loads, keys, keys_while_a_policy_runs }));
await browser.close();
