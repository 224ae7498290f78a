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

const server = http.createServer((request, response) => {
  if (request.url === "/favicon.ico") return response.writeHead(204).end();
  const file = path.join(root, decodeURIComponent(new URL(request.url, "http://x").pathname));
  if (!fs.existsSync(file) || !fs.statSync(file).isFile()) return response.writeHead(404).end();
  response.writeHead(200, { "content-type": types[path.extname(file)] ?? "text/plain" });
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
  protocolTimeout: 600_000,
});
const problems = { count: 0, push: (text) => console.log(text, `(${(problems.count += 1)})`) };

async function look(name, width, theme) {
  const page = await browser.newPage();
  const at = `${name}, ${width} px, ${theme}`;
  page.on("console", (message) => problems.push(`${at}: console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`${at}: ${error.message}`));
  await page.setViewport({ width, height: 900 });
  await page.evaluateOnNewDocument((value) => localStorage.setItem("theme", value), theme);
  await page.goto(`${address}/${name}`, { waitUntil: "load", timeout: 120_000 });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (wide > 1) problems.push(`${at}: ${wide} px wider than the window`);
  await page.evaluate(axe);
  const found = await page.evaluate(() =>
    window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] })
  );
  for (const one of found.violations) {
    const nodes = one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join("\n    ");
    problems.push(`${at}: ${one.id}, ${one.nodes.length} times: ${one.help}\n    ${nodes}`);
  }
  if (pictures) {
    const file = `${name.replaceAll("/", "-")}-${width}-${theme}.png`;
    await page.screenshot({ path: path.join(pictures, file), fullPage: true });
  }
  await page.close();
}

async function search(words) {
  const page = await browser.newPage();
  await page.goto(`${address}/search.html?q=${encodeURIComponent(words)}`, { waitUntil: "load" });
  await page
    .waitForSelector("#search-results li a", { timeout: 60_000 })
    .catch(() => problems.push(`search: nothing found for ${words}`));
  await page.close();
}

for (const name of pages) {
  for (const width of [1280, 390]) {
    await look(name, width, "light");
    await look(name, width, "dark");
  }
}
await search("accumulate");
await search("find_batch_size");
await browser.close();
server.close();
console.log(`${pages.length} pages, ${problems.count} problems`);
process.exitCode = problems.count ? 1 : 0;
