// Python and the compiler, away from the page, so that typing never waits.
//
// A request is {id, ask, ...}, its answer {id, answer} or {id, error}. Only the newest request of a kind is worth an answer: those
// that were overtaken while another one was worked on are answered with {id, overtaken: true}.

import { startPython } from "./python.js";

const waiting = [];
let working = false;
let page;

const started = (async () => {
  page = (await startPython()).pyimport("page");
})();

const asks = {
  language: () => page.language(),
  check: ({ text }) => page.check(text),
  explain: ({ text }) => page.explain(text),
  generate: ({ text }) => page.generate(text),
  layout: ({ text }) => page.layout(text),
  hover: ({ text, line, character }) => page.hover(text, line, character),
};

async function work() {
  working = true;
  try {
    await started;
  } catch (error) {
    self.postMessage({ failed: String(error) });
    return;
  }
  while (waiting.length) {
    const request = waiting.shift();
    if (waiting.some((later) => later.ask === request.ask)) {
      self.postMessage({ id: request.id, overtaken: true });
      continue;
    }
    try {
      self.postMessage({ id: request.id, answer: JSON.parse(await asks[request.ask](request)) });
    } catch (error) {
      self.postMessage({ id: request.id, error: String(error) });
    }
    await new Promise((resolve) => setTimeout(resolve)); // what was typed meanwhile comes in
  }
  working = false;
}

self.onmessage = ({ data }) => {
  waiting.push(data);
  if (!working) work();
};
