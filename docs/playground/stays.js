// Which tokens stay: the recorded page, token by token, under the policy of the editor and one beside it.

import { decoded, encoded } from "./links.js";

const at = (id) => document.getElementById(id);
const SIDES = ["mine", "beside"];
const WAIT = 300; // ms without a change before a run begins
const PINNED = "this text, as it is now";
const CHART = { width: 320, height: 48, tops: [0.05, 0.1, 0.25, 0.5, 1] };

const answers = new Map(); // of runs, by their question
const sides = Object.fromEntries(SIDES.map((side) => [side, { text: undefined, question: undefined, found: undefined }]));
let reader;
let page;
let policies;
let pinned;
let runs = 0;
let timer;

/** Makes the controls; `shipped` are policies by name, `link` is what the address says. Python is started only by `show`. */
export function prepare(shipped, link) {
  policies = shipped;
  pinned = decoded(link.get("beside"));
  at("versus").append(...Object.keys(policies).map((name) => new Option(name, name)), new Option(PINNED, PINNED));
  if (pinned !== undefined) at("versus").value = Object.keys(policies).find((name) => policies[name] === pinned) ?? PINNED;
  for (const name of ["prompt", "params"]) if (link.has(name)) at(name).value = link.get(name);
  at("versus").addEventListener("change", () => {
    pinned = sides.mine.text;
    later();
  });
  for (const name of ["layer", "head", "prompt", "params"]) at(name).addEventListener("input", later);
  at("moment").addEventListener("input", draw);
  at("reading").addEventListener("submit", (event) => event.preventDefault());
  at("moment").value = link.get("moment") ?? at("moment").max;
  at("layer").dataset.wanted = link.get("layer") ?? "16";
  at("head").dataset.wanted = link.get("head") ?? "1";
}

/** What a link has to say so that another visit shows the same. */
export function told() {
  const beside = text("beside");
  const said = Object.fromEntries(["layer", "head", "prompt", "params", "moment"].map((name) => [name, at(name).value]));
  return beside === undefined ? said : { ...said, beside: encoded(beside) };
}

/** Shows the page under the policy; null where that has errors. */
export function show(policy) {
  start();
  if (policy === null) return;
  sides.mine.text = policy;
  later();
}

function start() {
  if (reader) return;
  reader = new Worker(new URL("reader.js", import.meta.url), { type: "module" });
  reader.addEventListener("error", (event) => fail(event.message));
  reader.addEventListener("message", ({ data }) => {
    if (data.page) begin(data.page);
    else if (data.failed) fail(data.failed);
    else if (data.id === sides[data.side].id) hear(data.side, data.answer);
  });
}

function fail(reason) {
  at("waiting").textContent = `The reference interpreter could not be started in this browser: ${reason}`;
}

/** What was recorded is there. */
function begin(found) {
  page = found;
  const { title, author } = page.book;
  at("source").textContent = `${page.model} over ${page.tokens.length} tokens of ${title} by ${author}`;
  fill("layer", page.layers);
  fill("head", [...Array(page.heads).keys()]);
  at("prompt").max = String(page.tokens.length - 1);
  at("waiting").hidden = true;
  at("reading").hidden = false;
  ask();
}

function fill(name, values) {
  const wanted = at(name).dataset.wanted;
  at(name).replaceChildren(...values.map((value) => new Option(value, value)));
  at(name).value = values.map(String).includes(wanted) ? wanted : String(values[0]);
}

// -- runs -------------------------------------------------------------------------------------------------------------

function later() {
  clearTimeout(timer);
  timer = setTimeout(ask, WAIT);
}

const text = (side) => (side === "mine" ? sides.mine.text : (policies[at("versus").value] ?? (at("versus").value && pinned)));

/** Asks for what is not known yet. */
function ask() {
  if (!page) return;
  const params = values();
  const first = Math.max(1, Math.min(Math.floor(Number(at("prompt").value)) || 1, page.tokens.length - 1));
  at("moment").min = String(first);
  at("moment").max = String(page.tokens.length);
  for (const side of SIDES) {
    const own = sides[side];
    at(side).hidden = !text(side);
    if (!text(side) || !params) continue;
    const question = { text: text(side), layer: Number(at("layer").value), head: Number(at("head").value), prompt: first, params };
    const key = JSON.stringify(question);
    if (own.question === key) continue;
    own.question = key;
    own.id = ++runs;
    at(side).setAttribute("aria-busy", "true");
    if (answers.has(key)) hear(side, answers.get(key));
    else reader.postMessage({ side, id: own.id, question: key });
  }
  draw();
}

/** The params as they are written in the field, by name; undefined, and the field says so, where it cannot be read. */
function values() {
  const parts = at("params").value.split(/[\s,]+/).filter(Boolean);
  const pairs = parts.map((part) => /^([A-Za-z_]\w*)=(-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)$/.exec(part));
  const wrong = pairs.findIndex((pair) => !pair);
  at("params").setCustomValidity(wrong < 0 ? "" : `${parts[wrong]}: write name=number`);
  at("params").reportValidity();
  return wrong < 0 ? Object.fromEntries(pairs.map(([, name, value]) => [name, value])) : undefined;
}

/** An answer, which may go on. */
function hear(side, answer) {
  const own = sides[side];
  const isWhole = answer.done === 1;
  own.found = answer;
  at(side).setAttribute("aria-busy", String(!isWhole));
  if (isWhole) {
    if (answers.size > 200) answers.clear();
    answers.set(own.question, answer);
    document.body.dataset.stays = String(Number(document.body.dataset.stays ?? 0) + 1);
  }
  draw();
}

// -- the text ---------------------------------------------------------------------------------------------------------

/** Shows the moment of the slider, on both sides; of a run that goes on, no later one than it has reached. */
function draw() {
  if (!page) return;
  const read = Number(at("moment").value);
  const newest = page.tokens[read - 1];
  at("now").textContent = `${read} of ${page.tokens.length} tokens read; the last is “${shown(newest).trim()}”`;
  at("moment").setAttribute("aria-valuetext", at("now").textContent);
  const drawn = SIDES.filter((side) => !at(side).hidden && sides[side].found);
  const most = Math.max(...drawn.flatMap((side) => sides[side].found.lost ?? []), 0);
  const top = CHART.tops.find((share) => share >= most) ?? 1;
  at("top").textContent = `${100 * top} %`;
  for (const side of drawn) drawSide(at(side), sides[side].found, read, top);
}

function drawSide(box, found, moment, top) {
  const first = found.first;
  const read = Math.min(moment, found.known);
  box.querySelector("h2").textContent = found.name ?? "";
  box.querySelector("progress").hidden = found.done === 1;
  box.querySelector("progress").value = found.done;
  const said = box.querySelector(".said");
  if (found.error) {
    said.textContent = found.error;
    box.querySelector(".page").replaceChildren();
    box.querySelector("svg").replaceChildren();
    return;
  }
  const gone = (token) => found.left[token] !== null && found.left[token] < read;
  const looked = found.read && read > first ? new Set(found.read[read - 1 - first]) : undefined;
  const parts = page.tokens.flatMap((token, index) => {
    if (index >= read) return part("span", "coming", token);
    if (gone(index)) return part("del", "", token);
    const [, space, word] = /^(\s*)([^]*)$/.exec(token); // a colour begins with the word
    return [space, part("mark", looked && !looked.has(index) ? "unread" : "", word)];
  });
  box.querySelector(".page").replaceChildren(...parts);
  said.textContent = found.known ? summary(found, first, read, gone, looked) : "The prompt is being read …";
  drawChart(box.querySelector("svg"), found.lost, read - first, page.tokens.length - first, top);
}

function part(name, className, token) {
  return Object.assign(document.createElement(name), { className, textContent: shown(token) });
}

const shown = (token) => token.replaceAll("\n", "↵\n");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** What the picture shows, in words. */
function summary(found, first, read, gone, looked) {
  const kept = [...Array(read).keys()].filter((token) => !gone(token));
  const said = [`${kept.length} of ${read} tokens are there`];
  if (looked) said.push(`the query reads ${looked.size} of them`);
  const lost = found.lost.slice(0, read - first);
  if (lost.length) {
    const mean = lost.reduce((sum, share) => sum + share, 0) / lost.length;
    said.push(`the query misses ${percent(lost.at(-1))} of its attention, ${percent(mean)} on average so far`);
  }
  const left = found.left.flatMap((when, token) => (when === read - 1 ? [`“${page.tokens[token].trim()}”`] : []));
  if (left.length) said.push(left.length > 5 ? `${left.length} tokens have just left` : `${left.join(", ")} just left`);
  return `${said.join("; ")}.`;
}

/** The attention that every query misses, and the moment. */
function drawChart(svg, lost, moment, moments, top) {
  const across = (index) => (CHART.width * index) / Math.max(1, moments - 1);
  const points = lost.map((share, index) => `${across(index).toFixed(1)},${(CHART.height * (1 - share / top)).toFixed(1)}`);
  svg.setAttribute("viewBox", `0 -1 ${CHART.width} ${CHART.height + 2}`);
  svg.replaceChildren(shape("polyline", { points: points.join(" ") }));
  if (moment > 0) svg.append(shape("line", { x1: across(moment - 1), x2: across(moment - 1), y1: 0, y2: CHART.height }));
}

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
