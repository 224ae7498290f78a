// Opens every page of build/docs in headless Chromium: wide and narrow, light and dark.
// Fails on messages in the console, pages wider than the window, findings of axe-core, and a
// search that finds nothing. Started by .ci/site, which passes options on: --pictures FOLDER writes
// a picture of each page, and --pages TEXT looks only at pages whose names contain it.
import fs from "node:fs";
import http from "node:http";
import path from "node:path";
import { createRequire } from "node:module";

const [root, tools, ...options] = process.argv.slice(2);
const load = createRequire(path.join(path.resolve(tools), "package.json"));
const puppeteer = load("puppeteer-core");
const axe = fs.readFileSync(load.resolve("axe-core/axe.min.js"), "utf8");
const option = (name) => (options.includes(name) ? options[options.indexOf(name) + 1] : "");
const pictures = option("--pictures");
const types = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml" };

// Colors are checked everywhere, structure in one combination, and what a narrow window shows and
// scrolls in another.
const standard = { type: "tag", values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] };
const shown = ["scrollable-region-focusable", "button-name", "link-name", "label", "aria-hidden-focus"];
const combinations = [
  { width: 1280, theme: "light", structure: standard },
  { width: 1280, theme: "dark" },
  { width: 390, theme: "light", structure: { type: "rule", values: shown } },
  { width: 390, theme: "dark" },
];

const server = http.createServer((request, response) => {
  if (request.url === "/favicon.ico") return response.writeHead(204).end();
  const file = path.join(root, decodeURIComponent(new URL(request.url, "http://x").pathname));
  if (!fs.existsSync(file) || !fs.statSync(file).isFile()) return response.writeHead(404).end();
  const type = types[path.extname(file)] ?? "text/plain";
  response.writeHead(200, { "content-type": type, "cache-control": "max-age=3600" });
  fs.createReadStream(file).pipe(response);
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const address = `http://127.0.0.1:${server.address().port}`;
const pages = fs
  .readdirSync(root, { recursive: true })
  .filter((name) => name.endsWith(".html") && !name.startsWith("_") && !/^(genindex|py-modindex)/.test(name))
  .filter((name) => name.includes(option("--pages")))
  .sort();
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu"],
  protocolTimeout: 300_000,
});
const problems = { count: 0, push: (text) => console.log(text, `(${(problems.count += 1)})`) };

// Runs in the page. Contrast depends on color, size and weight of a text and on the backgrounds
// behind it: one element of each kind is checked, since axe-core takes milliseconds for each and a
// page of the reference has thousands.
function checkPage(structure) {
  const kinds = new Set();
  const behind = (element) => {
    if (!element) return "";
    const { backgroundColor, backgroundImage, opacity } = getComputedStyle(element);
    return `${behind(element.parentElement)};${backgroundColor} ${backgroundImage} ${opacity}`;
  };
  for (const element of document.body.querySelectorAll("*")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || !element.checkVisibility({ visibilityProperty: true })) continue;
    const { color, fontSize, fontWeight } = getComputedStyle(element);
    const kind = `${color} ${fontSize} ${fontWeight}${behind(element)}`;
    if (!kinds.has(kind)) element.setAttribute("data-look", "");
    kinds.add(kind);
  }
  const colors = axe.run({ include: ["[data-look]"] }, {
    runOnly: { type: "rule", values: ["color-contrast"] }, resultTypes: ["violations"],
  });
  const rules = { "color-contrast": { enabled: false } };
  const others = (before) => axe.run(document, { runOnly: structure, rules, resultTypes: ["violations"] })
    .then((after) => [...before.violations, ...after.violations]);
  return colors.then((found) => (structure ? others(found) : found.violations));
}

async function look(page, name, structure, at) {
  await page.goto(`${address}/${name}`, { waitUntil: "load", timeout: 120_000 });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wide > 1) problems.push(`${at}: ${wide} px wider than the window`);
  for (const one of await page.evaluate(checkPage, structure)) {
    const nodes = one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join("\n    ");
    problems.push(`${at}: ${one.id}, ${one.nodes.length} times: ${one.help}\n    ${nodes}`);
  }
}

// One page object for all files, in a context of its own, since the theme is kept in localStorage.
async function lookAtAll({ width, theme, structure }) {
  const page = await (await browser.createBrowserContext()).newPage();
  let at = "";
  page.on("console", (message) => problems.push(`${at}: console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`${at}: ${error.message}`));
  await page.setViewport({ width, height: 900 });
  await page.evaluateOnNewDocument((value) => localStorage.setItem("theme", value), theme);
  await page.evaluateOnNewDocument(axe);
  const start = Date.now();
  for (const name of pages) {
    at = `${name}, ${width} px, ${theme}`;
    await look(page, name, structure, at);
    if (pictures) {
      const file = `${name.replaceAll("/", "-")}-${width}-${theme}.png`;
      await page.screenshot({ path: path.join(pictures, file), fullPage: true });
    }
  }
  await page.close();
  console.log(`${width} px, ${theme}: ${pages.length} pages in ${Math.round((Date.now() - start) / 1000)} s`);
}

async function search(words) {
  const page = await browser.newPage();
  await page.goto(`${address}/search.html?q=${encodeURIComponent(words)}`, { waitUntil: "load" });
  await page
    .waitForSelector("#search-results li a", { timeout: 60_000 })
    .catch(() => problems.push(`search: nothing found for ${words}`));
  await page.close();
}

await Promise.all(combinations.map(lookAtAll));
await Promise.all(["accumulate", "find_batch_size"].map(search));
await browser.close();
server.close();
console.log(`${pages.length} pages, ${problems.count} problems`);
process.exitCode = problems.count ? 1 : 0;
