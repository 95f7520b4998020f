// A person's visit to the playground, in a headless browser: what was seen, as JSON on standard output.
//
//   node visit.mjs PLAYWRIGHT CHROMIUM ADDRESS PICTURES

const [playwright, chromium, address, pictures] = process.argv.slice(2);
const { default: core } = await import(`${playwright}/index.js`);
const browser = await core.chromium.launch({ executablePath: chromium, args: ["--no-sandbox"] });
const seen = { requests: [], errors: [] };

/** A page of the playground that is ready, under the address and what is behind it. */
async function visit(behind = "", options = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 860 }, ...options });
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.errors.push(error.message));
  page.on("console", (said) => said.type() === "error" && seen.errors.push(said.text()));
  await page.goto(address + behind);
  await page.waitForSelector("body[data-checked], #failure:not([hidden])", { timeout: 180_000 });
  return page;
}

const read = (page, selector) => page.$eval(selector, (node) => node.innerText);

/** Does something and waits until the compiler has answered it. */
async function after(page, act) {
  const before = Number(await page.getAttribute("body", "data-checked"));
  await act();
  await page.waitForFunction((old) => Number(document.body.dataset.checked) > old, before, { timeout: 60_000 });
}

const page = await visit();
seen.first = { summary: await read(page, "#summary"), explained: await read(page, "#explain") };
await page.screenshot({ path: `${pictures}/playground.png` });

// An error, typed, and mended.
await page.click("#editor .cm-line:has-text('score mean')");
await page.keyboard.press("End");
await after(page, () => page.keyboard.type(" * nrm1(v)"));
await page.waitForFunction(() => document.getElementById("summary").innerText.includes("error"));
const marks = await page.$$eval(".cm-lintRange-error", (all) => all.map((one) => one.innerText));
seen.wrong = { summary: await read(page, "#summary"), list: await read(page, "#list"), marks };
await page.screenshot({ path: `${pictures}/playground_error.png` });
await page.click("#list button");
seen.jumped = await page.evaluate(() => document.activeElement.classList.contains("cm-content"));
await page.keyboard.press("ArrowRight"); // the caret stood before the word
await after(page, () => page.keyboard.type("o"));
await page.waitForFunction(() => document.getElementById("summary").innerText === "no findings");
await page.waitForFunction(() => document.getElementById("explain").innerText.includes("value vectors"));
seen.mended = { summary: await read(page, "#summary"), chosen: await page.$eval("#shipped", (node) => node.value) };

// What is generated, by keyboard.
seen.generated = {};
await page.focus("#tab-explain");
for (const name of ["cpp", "triton", "torch"]) {
  await page.keyboard.press("ArrowRight");
  seen.generated[name] = await page.waitForSelector(`#${name}:not([hidden]) .cm-line`).then(() => read(page, `#${name} .cm-content`));
}

// A link.
await page.click("#share");
seen.link = page.url();
const other = await visit(new URL(seen.link).hash, { colorScheme: "dark", viewport: { width: 390, height: 800 } });
seen.linked = { text: await read(other, "#editor .cm-content"), wide: await other.evaluate(() => document.documentElement.scrollWidth) };
await other.screenshot({ path: `${pictures}/playground_dark_narrow.png`, fullPage: true });

// Another policy.
await after(page, () => page.selectOption("#shipped", "snapkv"));
seen.shipped = await read(page, "#editor .cm-content");

await browser.close();
console.log(JSON.stringify(seen));
