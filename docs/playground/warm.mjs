// Does once, while the site is made, what every visit would wait for: Python's byte code, and the parser's tables in kvdsl's cache.
//
//   node warm.mjs PYODIDE IN.zip OUT.zip

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [pyodide, given, made] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`));
const python = await loadPyodide();
const archive = readFileSync(given);
python.unpackArchive(archive.buffer.slice(archive.byteOffset, archive.byteOffset + archive.length), "zip", { extractDir: "/kvdsl" });
run(`
import compileall, os, py_compile, sys, zipfile

sys.path.insert(0, "/kvdsl")
os.environ["KVDSL_CACHE_DIR"] = "/kvdsl/cache"
assert compileall.compile_dir("/kvdsl", quiet=1, optimize=0, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
import page
page.language()
with zipfile.ZipFile("/warm.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for folder, _, names in os.walk("/kvdsl"):
        for name in names:
            path = os.path.join(folder, name)
            archive.write(path, os.path.relpath(path, "/kvdsl"))
`);
writeFileSync(made, python.FS.readFile("/warm.zip"));

function run(program) {
  try {
    python.runPython(program);
  } catch (error) {
    console.error(error.message); // without the line of Pyodide's that it was thrown from, a megabyte long
    process.exit(1);
  }
}
