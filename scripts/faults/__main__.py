"""See the package."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .planted import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("found.md")
LIMIT = 1800
"""Seconds after which the tests of a fault count as failed: it made one wait for ever."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.faults")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose room, file or text has this")
    chosen = [fault for fault in FAULTS if parser.parse_args().only in f"{fault.room} {fault.file} {fault.old}"]
    known = _read() if len(chosen) < len(FAULTS) else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        for number, fault in enumerate(chosen, 1):
            known[_key(fault)] = row = _planted(tree, fault)
            print(f"{number}/{len(chosen)} {' | '.join(_key(fault))} | {row}", flush=True)
            TABLE.write_text(_table(known), encoding="utf-8")
    missed = [key for key, row in known.items() if not row.startswith(("gate", "nightly"))]
    sys.exit(f"not found: {missed}" if missed else 0)


def _copy(tree: Path) -> None:
    """The files that git knows, and those that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)  # some tests ask git what there is
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)


def _planted(tree: Path, fault: Fault) -> str:
    """Which test finds it: `gate` or `nightly`, and its name."""
    file = tree / fault.file
    text = file.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        return "the place has changed"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        for run, which in (("gate", "not nightly"), ("nightly", "nightly")):
            for tests in _processes(fault.tests):
                found = _failing(tree, tests, which)
                if found:
                    return f"{run} | {found}"
        return "missed | "
    finally:
        file.write_text(text, encoding="utf-8")


def _processes(tests: Sequence[str]) -> list[list[str]]:
    """What runs in one process: Triton's interpreter needs one of its own."""
    apart = [[test for test in tests if test.startswith("tests/triton") == interpreted] for interpreted in (False, True)]
    return [one for one in apart if one]


def _failing(tree: Path, tests: list[str], which: str) -> str | None:
    """The first test that fails, if one does."""
    interpreted = tests[0].startswith("tests/triton")
    path = os.pathsep.join(map(str, (tree, tree / "lab")))
    cache = os.environ.get(
        "KVDSL_CACHE_DIR", str(ROOT / ".pytest_cache" / "kvdsl")
    )  # by digests of what is built: faults have others
    env = os.environ | {"PYTHONPATH": path, "KVDSL_CACHE_DIR": cache, "TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", which, *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"`{tests[0]}`, which never ends"
    if done.returncode in (0, 5):  # all passed, or there is none
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return f"`{failed[1]}`" if failed else f"`{tests[0]}`: {done.stdout[-200:]!r} {done.stderr[-200:]!r}"


# -- the table ---------------------------------------------------------------------------------------------------------


def _key(fault: Fault) -> tuple[str, str, str]:
    old, new = (" ".join(text.split()) for text in (fault.old, fault.new))
    return fault.room, f"`{fault.file}`", f"`{old}` → `{new}`" if new else f"`{old}` is missing"


def _table(known: dict[tuple[str, str, str], str]) -> str:
    rows = [(key, known[key]) for key in map(_key, FAULTS) if key in known]
    by = {run: sum(row.startswith(run) for _, row in rows) for run in ("gate", "nightly")}
    head = "# Planted faults\n\nMade by `python -m scripts.faults`.\n\n"
    head += f"Of {len(rows)} faults the gate finds {by['gate']}, and the nightly tests {by['nightly']} more.\n\n"
    lines = ["| room | file | fault | found by | first test that fails |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in key)} | {row} |" for key, row in rows]
    return head + "\n".join(lines) + "\n"


def _read() -> dict[tuple[str, str, str], str]:
    """What the table says."""
    if not TABLE.is_file():
        return {}
    found = dict[tuple[str, str, str], str]()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.replace("\\|", "|") for cell in re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |"))]
        if len(cells) == 5 and cells[0] not in ("room", "---"):
            found[cells[0], cells[1], cells[2]] = " | ".join(cells[3:])
    return found


main()
