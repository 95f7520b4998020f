"""`python -m scripts.gpu`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu import __doc__ as about
from scripts.gpu.experiments import EXPERIMENTS, LEFT_OUT, Experiment, in_time
from scripts.gpu.setting import ROOT, Lines, Setting

INTERPRETED = 100
"""How many times an experiment's deadline its toy has in Triton's interpreter."""


def main() -> int:
    """Run experiments; 1 if something is wrong or one did not end, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="scripts.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(EXPERIMENTS)} [default: all]")
    parser.add_argument("--seconds", type=int, default=840, help="of all; fewer leave out the least telling [default: 840]")
    parser.add_argument("--policies", metavar="A,B", help="only these")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--list", action="store_true", help="name the experiments, their questions and deadlines")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(EXPERIMENTS)
    unknown = sorted(set(names) - set(EXPERIMENTS))
    if unknown:
        parser.error(f"there is no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if options.list:
        return _listed()
    setting = Setting.of(toy=options.toy, policies=options.policies, out=options.out)
    if setting is None:
        print("There is no GPU here that torch can use. Nothing to run.", file=sys.stderr)
        return 2
    if options.inside:
        return EXPERIMENTS[names[0]].module.run(setting, Lines(setting.out / f"{names[0]}.jsonl"))
    print(setting.out, flush=True)
    bad = [name for name in in_time(names, options.seconds) if not _ran(EXPERIMENTS[name], setting, sys.argv[1:])]
    if bad:
        print(f"not well: {', '.join(bad)}")
    return 1 if bad else 0


def _listed() -> int:
    for one in EXPERIMENTS.values():
        print(f"{one.number} {one.name}, at most {one.seconds} s: {one.question}")
    for what in LEFT_OUT:
        print(f"not written: {what}")
    return 0


def _ran(one: Experiment, setting: Setting, arguments: list[str]) -> bool:
    """Run an experiment in a process of its own and note what it found; whether it ended in time, with nothing wrong."""
    print(f"\n=== {one.name}, at most {one.seconds} s: {one.question}", flush=True)
    command = [sys.executable, "-m", "scripts.gpu", *arguments, "--only", one.name, "--inside"]
    patience = INTERPRETED if "--toy" in arguments else 1
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(one.seconds * patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"{one.name}: stopped at its deadline; what it found by then is kept", flush=True)
    own = setting.out / f"{one.name}.jsonl"
    found = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    line = {
        "experiment": one.name, "question": one.question, "deadline_s": one.seconds,
        "seconds": round(time.monotonic() - begun, 1), "exit": code, "found": found,
    }  # fmt: skip
    with (setting.out / "experiments.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
