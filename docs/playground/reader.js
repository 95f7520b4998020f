// Reads the recorded page under policies, with the reference interpreter, away from the page and from the compiler.
//
// A request is {side, id, question}; it takes the place of the side's one before. What is said of it is {side, id, answer}, again and again
// until the answer is `done`. First of all comes {page}, what was recorded.

import { beside, startPython } from "./python.js";

const open = new Map();
let working = false;
let python;

const started = (async () => {
  const pyodide = await startPython();
  pyodide.FS.writeFile("/kvdsl/recording.bin", new Uint8Array(await beside("recording.bin")));
  pyodide.runPython("import plain_numpy; plain_numpy.install()");
  python = pyodide.pyimport("who_stays");
  self.postMessage({ page: JSON.parse(python.page()) });
})();

async function work() {
  working = true;
  try {
    await started;
  } catch (error) {
    self.postMessage({ failed: String(error) });
    return;
  }
  while (open.size) {
    for (const [side, run] of open) {
      const answer = goOn(side, run);
      if (answer.done === 1) open.delete(side);
      self.postMessage({ side, id: run.id, answer });
      await new Promise((resolve) => setTimeout(resolve)); // a newer request comes in
    }
  }
  working = false;
}

function goOn(side, run) {
  try {
    if (!run.begun) python.begin(side, run.question);
    run.begun = true;
    return JSON.parse(python.go_on(side));
  } catch (error) {
    const reason = String(error.message ?? error).trim().split("\n").at(-1);
    return { done: 1, error: `This run failed, which it should not: ${reason}` };
  }
}

self.onmessage = ({ data }) => {
  open.set(data.side, { id: data.id, question: data.question, begun: false });
  if (!working) work();
};
