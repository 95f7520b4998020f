// The page: an editor, and beside it what the compiler says of its policy.

import { ask, failed } from "./compiler.js";
import { codeView, jump, policyEditor, setText, showProblems } from "./editor.js";
import { decoded, encoded, link } from "./links.js";
import * as stays from "./stays.js";

const at = (id) => document.getElementById(id);
const FIRST = "roco";
const FILES = { cpp: ["kernels_cpu.cpp", "C++"], triton: ["kernels_triton.py", "Triton"], torch: ["kernels_torch.py", "torch"] };
const WAIT = 60; // ms without a key before the compiler is asked

let language;
let view;
let timer;
let checks = 0;
let faulty = false;
let sound = false; // whether any text had no errors yet
let text = "";
const codes = {};

start().catch(fail);
failed.then((reason) => fail(new Error(reason)));

async function start() {
  language = await ask("language");
  for (const name of Object.keys(language.policies)) at("shipped").append(new Option(name, name));
  text = shared() ?? language.policies[FIRST];
  name();
  view = policyEditor(at("editor"), language, text, {
    changed,
    format,
    hover: (line, character) => ask("hover", { text, line, character }),
    explained: (parts) => at("explained").replaceChildren(...parts),
  });
  at("loading").remove();
  document.body.dataset.ready = "true";
  at("shipped").addEventListener("change", () => setText(view, language.policies[at("shipped").value] ?? text));
  at("share").addEventListener("click", share);
  at("format").addEventListener("click", format);
  addEventListener("hashchange", () => shared() !== undefined && setText(view, shared()));
  stays.prepare(language.policies, link());
  tabs();
  await update();
  if (link().get("view") === "stays") at("tab-stays").click();
}

/** Which of the shipped policies the text is. */
function name() {
  at("shipped").value = Object.keys(language.policies).find((stem) => language.policies[stem] === text) ?? "";
}

function fail(error) {
  const box = at("failure");
  box.hidden = false;
  box.textContent = `The compiler could not be started in this browser: ${error.message ?? error}`;
}

// -- the text ---------------------------------------------------------------------------------------------------------

function changed(now) {
  text = now;
  name();
  clearTimeout(timer);
  timer = setTimeout(() => update().catch(fail), WAIT);
}

async function format() {
  const laid = await ask("layout", { text });
  if (laid) setText(view, laid);
}

async function update() {
  const asked = text;
  const found = await ask("check", { text: asked });
  if (!found || asked !== text) return;
  faulty = found.some((one) => one.severity === "error");
  sound ||= !faulty;
  at("older").hidden = !faulty;
  at("older").textContent = sound ? "The text has errors: this is the last policy without any." : "The text has errors: mend them to see more.";
  showProblems(view, found);
  listProblems(found);
  document.body.dataset.checked = String(++checks);
  await showTab();
}

function listProblems(found) {
  const counts = ["error", "warning"].map((kind) => [found.filter((one) => one.severity === kind).length, kind]);
  const said = counts.filter(([n]) => n).map(([n, kind]) => `${n} ${kind}${n === 1 ? "" : "s"}`);
  at("summary").textContent = said.join(", ") || "no findings";
  at("list").replaceChildren(
    ...found.map((one) => {
      const item = document.createElement("li");
      const place = document.createElement("button");
      place.type = "button";
      place.textContent = `line ${one.line}: ${one.message}`;
      place.addEventListener("click", () => jump(view, one.from));
      item.className = one.severity;
      item.append(place, ` ${one.code}`);
      if (one.help) item.append(element("div", "help", `help: ${one.help}`));
      return item;
    }),
  );
}

// -- what is said of it -----------------------------------------------------------------------------------------------

function tabs() {
  const all = [...document.querySelectorAll("[role=tab]")];
  for (const [index, tab] of all.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) choose(all[(index + step + all.length) % all.length]).focus();
    });
  }
  function choose(tab) {
    for (const one of all) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
      at(one.getAttribute("aria-controls")).hidden = one !== tab;
    }
    showTab().catch(fail);
    return tab;
  }
}

const chosen = () => document.querySelector("[role=tab][aria-selected=true]").id.replace("tab-", "");

async function showTab() {
  if (chosen() === "explain") await explain();
  else if (chosen() === "stays") stays.show(faulty ? null : text);
  else await generate(chosen());
}

async function explain() {
  const said = await ask("explain", { text });
  if (!said) return;
  const table = document.createElement("table");
  for (const [title, lines] of Object.entries(said.rows)) {
    const row = table.insertRow();
    row.append(Object.assign(element("th", "", title), { scope: "row" }));
    const cell = row.insertCell();
    cell.append(...lines.map((line) => element("div", "", line)));
  }
  at("explain").replaceChildren(element("h2", "", said.name), ...said.doc.split(/\n\s*\n/).map((part) => element("p", "", part)), table);
}

async function generate(name) {
  const files = await ask("generate", { text });
  if (!files) return;
  const [file, label] = FILES[name];
  codes[name] ??= codeView(at(name), `generated ${label}`, name === "cpp" ? "cpp" : "python");
  setText(codes[name], files.error ?? files[file] ?? `This policy has no ${label} form; "what it does" says why.`);
}

function element(tag, className, content) {
  return Object.assign(document.createElement(tag), { className, textContent: content });
}

// -- links ------------------------------------------------------------------------------------------------------------

/** The policy that the address carries. */
const shared = () => decoded(link().get("policy"));

async function share() {
  const said = { policy: encoded(text), ...(chosen() === "stays" ? { view: "stays", ...stays.told() } : {}) };
  history.replaceState(null, "", `#${new URLSearchParams(said)}`);
  try {
    await navigator.clipboard.writeText(location.href);
    at("shared").textContent = "The link is copied.";
  } catch {
    at("shared").textContent = "The address is now a link to this policy.";
  }
}
