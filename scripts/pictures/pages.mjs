// Takes a picture of a page in a headless browser.
//
//   node pages.mjs CHROMIUM ADDRESS PLAYWRIGHT NAME OUT.png

const [program, address, playwright, name, out] = process.argv.slice(2);
const { default: core } = await import(`${playwright}/index.js`);

/** Where what a page has to say ends. */
const bottom = (page) => page.$eval("main", (node) => Math.ceil(node.getBoundingClientRect().bottom) + 16);

/** What is done before the picture is taken, and how large a page it shows. */
const pages = {
  async playground(page) {
    await page.goto(`${address}#view=stays&moment=240`);
    await page.waitForSelector("body[data-stays]", { timeout: 180_000 });
    const before = await page.getAttribute("body", "data-stays");
    await page.selectOption("#versus", "streaming_llm");
    await page.waitForFunction((old) => document.body.dataset.stays !== old, before, { timeout: 180_000 });
    return { width: 1200, height: 980 };
  },
  async explain(page) {
    await page.goto(address);
    return { width: 1000, height: await bottom(page) };
  },
  async trace(page) {
    await page.goto(address);
    await page.locator("#text span", { hasText: "road" }).first().hover();
    return { width: 1000, height: 820 };
  },
  async notebook(page) {
    await page.goto(address, { waitUntil: "domcontentloaded" });
    return { width: 1000, height: await bottom(page) };
  },
};

const browser = await core.chromium.launch({ executablePath: program, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1000, height: 700 }, colorScheme: "light" });
await page.route((url) => !url.href.startsWith(address), (route) => route.abort()); // nothing comes from other servers
const size = await pages[name](page);
await page.setViewportSize(size);
await page.screenshot({ path: out });
await browser.close();
