"""What starts fast: the compiler imports neither torch nor transformers; generated packages need none of the compiler."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.faults.planted import FAULTS
from scripts.structure import circles, module_name
from tests.quick import few

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "numpy", "IPython"}
IR = {"pydantic"}
NO_IR = {"fmt", "explain a code", "version", "help"}
"""Commands that need no policy's IR, nor the time that pydantic takes to be imported."""
COMMANDS = {
    "check": ["check", "roco"],
    "check Python": ["check", str(ROOT / "tests" / "lang" / "calm.py") + ":calm"],
    "check tests": ["check", str(ROOT / "policies" / "roco_test.kv")],
    "compile": ["compile", "roco"],
    "fmt": ["fmt", "--check", str(ROOT / "policies" / "roco.kv")],
    "list": ["list"],
    "explain": ["explain", "roco"],
    "explain a code": ["explain", "KV0301"],
    "version": ["--version"],
    "help": ["--help"],
}


def python(code: str, folder: Path, **environment: str) -> str:
    """What a program prints. Its process sees the checkout, and stands in another folder."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", few(COMMANDS, "check", "compile", "explain"))
def test_the_compiler_imports_nothing_heavy(tmp_path: Path, name: str) -> None:
    code = (
        "import sys, json, contextlib, io\n"
        "from kvdsl.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): code = main({COMMANDS[name]!r})\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )
    code_and_modules = json.loads(python(code, tmp_path))
    assert code_and_modules[0] == 0
    imported = {module.split(".")[0] for module in code_and_modules[1]}
    assert not (HEAVY | IR if name in NO_IR else HEAVY) & imported


def test_kvdsl_needs_no_laboratory() -> None:
    """Only `kvdsl/lab.py` names it, and imports it where something of it is asked for; generated packages know nothing of it."""
    sources = [
        path for folder in ("kvdsl", "generated", "templates") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    named = {
        path.relative_to(ROOT).as_posix() for path in sources if b"kvdsl_lab" in path.read_bytes() and path.suffix != ".pyc"
    }
    assert named == {"kvdsl/lab.py"}


def test_the_table_of_operations_needs_nothing(tmp_path: Path) -> None:
    code = "import sys; import kvdsl.ir.ops; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    assert not {"pydantic", "lark", "jinja2", "click", *HEAVY} & {*python(code, tmp_path).split()}


def test_the_interpreter_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, kvdsl.interp; print(*sorted({'torch', 'transformers'} & sys.modules.keys()))"
    assert not python(code, tmp_path).strip()


@pytest.mark.nightly
def test_generated_packages_need_no_compiler(tmp_path: Path) -> None:
    from kvdsl.cli import main

    assert main(["compile", "roco", "--out", str(tmp_path / "generated")]) == 0
    code = (
        "import sys\n"
        "for name in ('lark', 'jinja2', 'pydantic', 'click', 'rich'): sys.modules[name] = None\n"
        "from generated.roco import RoCoCache\n"
        "found = [name for name in sys.modules if name.startswith(('kvdsl.syntax', 'kvdsl.sema', 'kvdsl.ir', 'kvdsl.emit'))]\n"
        "assert not found, found\n"
    )
    python(code, tmp_path)


@pytest.mark.nightly
def test_shipped_policies_are_compiled_when_they_are_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import kvdsl, kvdsl.policies\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'RoCoCache' in dir(kvdsl.policies)\n"
        "from kvdsl.policies import H2OCache\n"
        "assert H2OCache is kvdsl.load('h2o') is kvdsl.policies.H2OCache\n"
        "assert H2OCache.__name__ == 'H2OCache'\n"
        "assert not hasattr(kvdsl.policies, 'H20Cache')\n"
    )
    cache = tmp_path / "cache"
    python(code, tmp_path, KVDSL_CACHE_DIR=str(cache))
    assert list(cache.glob("packages/h2o-*/manifest.json"))


def test_no_module_imports_itself_through_others() -> None:
    """For types or in functions either."""
    kvdsl = {module_name(path, ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "kvdsl").rglob("*.py")}
    assert circles(kvdsl) == []
    texts = {
        "one": "if TYPE_CHECKING:\n    from some import two", "two": "def f():\n    import some.three",
        "three": "from some.one import x", "four": "from some.one import x",
    }  # fmt: skip
    assert circles({f"some.{name}": ast.parse(text) for name, text in texts.items()}) == [
        {"some.one", "some.two", "some.three"}
    ]


def defined(tree: ast.Module) -> set[str]:
    """The names that a module binds anywhere, those of functions' bodies included."""
    names = {"__doc__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(one.asname or one.name).split(".")[0] for one in node.names}
    return names


def missing(modules: dict[str, ast.Module]) -> list[str]:
    """`module: source.name` for each name that a module imports from another one, which does not have it."""
    have = {name: defined(tree) for name, tree in modules.items()}
    wanted = [
        (name, node.module, one.name)
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and node.module in have
        and "__getattr__" not in have[node.module]
        for one in node.names
    ]
    return [
        f"{name}: {source}.{one}"
        for name, source, one in wanted
        if one not in have[source] and f"{source}.{one}" not in have
    ]


def test_what_a_module_imports_exists() -> None:
    """In scripts and nightly tests as well, which the gate does not import."""
    folders = {"kvdsl": ROOT, "scripts": ROOT, "tests": ROOT, "benchmarks": ROOT, "lab/kvdsl_lab": ROOT / "lab"}
    modules = {
        module_name(path, root): ast.parse(path.read_text(encoding="utf-8"))
        for folder, root in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert missing(modules) == []
    texts = {"one": "def _old(): pass", "two": "from one import _old, new\nif True:\n    from one import newer"}
    assert missing({name: ast.parse(text) for name, text in texts.items()}) == ["two: one.new", "two: one.newer"]


MISTAKES = [
    ["run", "h2o", "--set", "budget=0"],
    ["run", "rocko"],
    ["run", "h2o", "--set", "bugdet=3"],
    ["run", "h2o", "--rope", "cached"],
    ["run", "h2o", "--model", "smolm2"],
    ["run", "h2o", "--model", "./nope"],
    ["run", "h2o", "--prompt-file", "bin.txt"],
    ["run", "h2o", "--prompt", " "],
    ["run", "asks.kv"],
    ["trace", "h2o", "--set", "budget=0"],
    ["trace", "h2o", "--out", "nowhere/trace.html"],
    ["bench", "decode", "rocko"],
    ["bench", "generate", "--policies", "shift:rocko"],
    ["bench", "host", "--budgets", "none"],
    ["eval", "ppl", "--policies", "full,rocko"],
    ["eval", "ppl", "--policies", "full,h2o", "--set", "recent=-1"],
    ["eval", "fidelity", "--model", "./nope"],
    ["eval", "consistency", "--budgets", "2"],
    ["eval", "retrieval", "--text", "bin.txt"],
    ["leaderboard", "--policies", "full,rocko"],
    ["recommend", "--prompts", "bin.txt", "--bytes", "1MiB"],
    ["recommend", "--prompts", "asks.kv", "--bytes", "much"],
    ["recommend", "--prompts", "asks.kv", "--bytes", "1MiB", "--policies", "rocko"],
    ["search", "--text", "bin.txt"],
    ["calibrate", "rocko"],
    ["reproduce", "roco", "--text", "bin.txt"],
]


def test_mistakes_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """All in one process, which never imports torch or transformers, so that each answer comes in a fraction of a second."""
    (tmp_path / "bin.txt").write_bytes(b"\xff\xfe\xfa")
    text = 'kv 2\n\npolicy Asks {\n  "Mine."\n  param budget = 8\n  input worth\n  score worth\n}\n'
    (tmp_path / "asks.kv").write_text(text)
    code = (
        "import sys, json, contextlib, io\n"
        "from kvdsl.cli import main\n"
        "found = []\n"
        f"for words in {MISTAKES!r}:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err: code = main(words)\n"
        "    found.append([code, err.getvalue(), [name for name in ('torch', 'transformers') if name in sys.modules]])\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(python(code, tmp_path, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "lab")])))
    for words, (exit_code, said, imported) in zip(MISTAKES, found, strict=True):
        assert exit_code in (1, 2) and "error" in said and "internal" not in said, (words, said)
        assert not imported, (words, said)


def test_planted_faults_have_a_place() -> None:
    """Each replaces one text, and names tests that exist."""
    texts = {fault.file: (ROOT / fault.file).read_text(encoding="utf-8") for fault in FAULTS}
    assert [fault for fault in FAULTS if texts[fault.file].count(fault.old) != 1] == []
    assert {test for fault in FAULTS for test in fault.tests if not (ROOT / test).exists()} == set()
