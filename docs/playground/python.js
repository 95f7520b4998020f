// Python with the compiler in it, for a worker.

import { loadPyodide } from "./pyodide/pyodide.mjs";

/** A file that lies beside the page. */
export async function beside(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.arrayBuffer();
}

export async function startPython() {
  const archive = beside("python.zip"); // comes while Python starts
  const python = await loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href });
  python.unpackArchive(await archive, "zip", { extractDir: "/kvdsl" });
  python.runPython("import os, sys; sys.path.insert(0, '/kvdsl'); os.environ['KVDSL_CACHE_DIR'] = '/kvdsl/cache'");
  return python;
}
