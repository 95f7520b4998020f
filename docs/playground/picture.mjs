// Takes a picture of the page as it shows which tokens stay.
//
//   node picture.mjs CHROMIUM ADDRESS OUT.png

import { chromium } from "playwright-core";

const [program, address, out] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1200, height: 980 }, colorScheme: "light" });
await page.goto(`${address}#view=stays&moment=240`);
await page.waitForSelector("body[data-stays]", { timeout: 180_000 });
const before = await page.getAttribute("body", "data-stays");
await page.selectOption("#versus", "streaming_llm");
await page.waitForFunction((old) => document.body.dataset.stays !== old, before, { timeout: 180_000 });
await page.screenshot({ path: out });
await browser.close();
