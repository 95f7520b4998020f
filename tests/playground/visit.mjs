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

/** What axe finds that keeps people from using the page as it is now. */
async function barriers(page) {
  await page.addScriptTag({ path: `${playwright}/../axe-core/axe.min.js` });
  const found = await page.evaluate(() => axe.run(document));
  return found.violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`);
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
seen.barriers = await barriers(page);

// An error, typed, and mended.
await page.click("#editor .cm-line:has-text('score mean')");
await page.keyboard.press("End");
await after(page, () => page.keyboard.type(" * nrm1(v)"));
await page.waitForFunction(() => document.getElementById("summary").innerText.includes("error"));
const marks = await page.$$eval(".cm-lintRange-error", (all) => all.map((one) => one.innerText));
seen.wrong = { summary: await read(page, "#summary"), list: await read(page, "#list"), marks, older: await read(page, "#older") };
await page.screenshot({ path: `${pictures}/playground_error.png` });
await page.click("#list button");
seen.jumped = await page.evaluate(() => document.activeElement.classList.contains("cm-content"));
await page.keyboard.press("ArrowRight"); // the caret stood before the word
await after(page, () => page.keyboard.type("o"));
await page.waitForFunction(() => document.getElementById("summary").innerText === "no findings");
await page.waitForFunction(() => document.getElementById("explain").innerText.includes("value vectors"));
seen.mended = { summary: await read(page, "#summary"), older: await page.isVisible("#older"), chosen: await page.$eval("#shipped", (node) => node.value) };

// What a word means: by mouse, and by F1.
const word = page.locator("#editor .cm-line:has-text('score mean') >> text=mean").first();
await word.hover();
seen.hovered = await page.waitForSelector(".cm-tooltip .explained").then((tip) => tip.innerText());
await page.mouse.move(0, 0);
await page.click("#editor .cm-line:has-text('score mean')");
await page.keyboard.press("Home");
await page.keyboard.press("F1");
await page.waitForFunction(() => document.getElementById("explained").innerText);
seen.explained = await read(page, "#explained");

// What is generated, by keyboard.
seen.generated = {};
await page.focus("#tab-explain");
await page.keyboard.press("ArrowRight"); // past "which tokens stay"
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

// Which tokens stay: of a policy that is typed, at two moments, and beside another one.
const RUN = { timeout: 120_000 };

/** Does something and waits until nothing is being run any more that it began. */
async function afterRun(on, act) {
  const before = Number((await on.getAttribute("body", "data-stays")) ?? 0);
  await act();
  await on.waitForFunction((old) => Number(document.body.dataset.stays ?? 0) > old, before, RUN);
  await on.waitForFunction(() => !document.querySelector("#sides [aria-busy=true]"), undefined, RUN);
}

/** What a side shows: its words, and the tokens that are there. */
const side = async (on, name) => ({
  name: await read(on, `#${name} h2`),
  said: await read(on, `#${name} .said`),
  there: await on.$$eval(`#${name} .page mark`, (all) => all.map((one) => one.textContent)),
  gone: await on.$$eval(`#${name} .page del`, (all) => all.length),
});

const still = await visit("#prompt=280&params=budget%3D32&layer=16&head=1");
await still.selectOption("#shipped", "window");
await afterRun(still, () => still.click("#tab-stays"));
seen.struck = await still.$eval("#stays .page del", (node) => getComputedStyle(node).textDecorationLine);
seen.stays = { source: await read(still, "#source"), window: await side(still, "mine"), now: await read(still, "#now") };
await still.focus("#moment");
for (let count = 0; count < 10; count++) await still.keyboard.press("ArrowLeft");
seen.stays.earlier = await side(still, "mine");
seen.stays.spoken = await still.getAttribute("#moment", "aria-valuetext");
await still.click("#editor .cm-content");
await still.keyboard.press("Control+A");
await afterRun(still, () => still.keyboard.insertText("kv 1\n\npolicy Typed {\n  param budget = 8\n  score mean(attn)\n  keep last 4\n}\n"));
seen.stays.typed = await side(still, "mine");
await afterRun(still, () => still.selectOption("#versus", "h2o"));
await still.screenshot({ path: `${pictures}/playground_stays.png`, fullPage: true });
seen.stays.beside = await side(still, "beside");
const keys = [];
for (const key of " # a note") {
  const began = Date.now();
  await after(still, () => still.keyboard.type(key));
  keys.push(Date.now() - began);
}
seen.stays.keys = keys;
await still.fill("#params", "budget=");
await still.waitForFunction(() => document.getElementById("params").validationMessage);
seen.stays.wrong = await still.$eval("#params", (node) => node.validationMessage);
await still.fill("#params", "budget=32");
await still.click("#share");
const again = await visit(new URL(still.url()).hash, { colorScheme: "dark", viewport: { width: 390, height: 800 } });
await again.waitForFunction(() => Number(document.body.dataset.stays ?? 0) > 1, undefined, RUN);
seen.stays.shared = { mine: await side(again, "mine"), beside: await side(again, "beside") };
seen.barriers.push(...(await barriers(still)), ...(await barriers(again)));
seen.stays.wide = await again.evaluate(() => document.documentElement.scrollWidth);
await again.screenshot({ path: `${pictures}/playground_stays_dark_narrow.png`, fullPage: true });
await again.click("#editor .cm-content");
await again.keyboard.press("Control+A");
await afterRun(again, () => again.keyboard.insertText("kv 1\n\npolicy Given {\n  param budget = 8\n  given worth\n  score worth\n}\n"));
seen.stays.refused = await side(again, "mine");

await browser.close();
console.log(JSON.stringify(seen));
