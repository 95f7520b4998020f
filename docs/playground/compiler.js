// The page's side of the worker.

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const open = new Map();
let last = 0;

/** Asks the compiler; resolves to its answer, or to undefined where a newer question of the kind has overtaken this one. */
export function ask(kind, more = {}) {
  return new Promise((resolve, reject) => {
    open.set(++last, { resolve, reject });
    worker.postMessage({ id: last, ask: kind, ...more });
  });
}

export const failed = new Promise((resolve) => {
  worker.addEventListener("error", (event) => resolve(event.message));
  worker.addEventListener("message", ({ data }) => data.failed && resolve(data.failed));
});

worker.addEventListener("message", ({ data }) => {
  const found = open.get(data.id);
  if (!found) return;
  open.delete(data.id);
  if (data.error) found.reject(new Error(data.error));
  else found.resolve(data.answer);
});
