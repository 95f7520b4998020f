"""`python -m scripts.gpu`: see the package."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu import __doc__ as about
from scripts.gpu import show
from scripts.gpu.setting import ROOT, STAGES, Lines, Setting, module_of


def main() -> int:
    """Run stages; 1 if something is wrong or a stage did not end, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="scripts.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", default=",".join(STAGES), metavar="A,B", help=f"of {', '.join(STAGES)} [default: all]")
    parser.add_argument("--policies", metavar="A,B", help="only these")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, in Triton's interpreter")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted(set(options.stage.split(",")) - set(STAGES))
    if unknown:
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    setting = Setting.of(toy=options.toy, policies=options.policies, out=options.out)
    if setting is None:
        print("There is no GPU here that torch can use. Nothing to run.", file=sys.stderr)
        return 2
    if options.inside:
        return module_of(options.stage).run(setting, Lines(setting.out / f"{options.stage}.jsonl"))
    print(setting.out, flush=True)
    bad = [stage for stage in options.stage.split(",") if not _stage(stage, STAGES[stage], sys.argv[1:])]
    show.tables(setting.out)
    if bad:
        print(f"not well: {', '.join(bad)}")
    return 1 if bad else 0


def _stage(stage: str, seconds: int, arguments: list[str]) -> bool:
    """Run one stage in a process of its own; whether it ended in time, with nothing wrong."""
    print(f"\n=== {stage}, at most {seconds / 60:.0f} minutes", flush=True)
    command = [sys.executable, "-m", "scripts.gpu", *arguments, "--stage", stage, "--inside"]
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"{stage}: stopped at its deadline; what it found by then is kept", flush=True)
        return False
    print(f"{stage}: {time.monotonic() - begun:.0f} s", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
