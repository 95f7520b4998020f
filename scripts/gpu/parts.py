"""Experiment 2: what each kernel of a step takes. Of `full`, `attend` writes no logits and `settle` ranks nothing.

`ncu` watches `python -m scripts.gpu.parts POLICY`, where it is installed.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from typing import Any

from scripts.gpu.selection import SELECTED
from scripts.gpu.setting import ROOT, Lines, Setting, Shape, cache_class
from scripts.gpu.step import graph_of, layers_of, told
from scripts.gpu.timing import kernel_us

POLICIES = ("h2o", "roco", "full", "sparcas")
METRICS = (
    "dram__bytes.sum", "lts__t_bytes.sum", "gpu__time_duration.sum",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
)  # fmt: skip
_SECONDS = 20
"""Of one run under `ncu`."""


def run(setting: Setting, lines: Lines) -> int:
    """Each policy's kernels in a graph of many layers, then what `ncu` says of them."""
    lines.tell(**setting.environment(), missing=setting.missing())
    names = [name for name in POLICIES if name in setting.names]
    failed = 0
    for name in names:
        for shape in setting.sizes.selecting[:1] if name == "sparcas" else setting.sizes.parts:
            failed += told(lines, shape, [{"policy": name, "us": _us(name, shape, setting)}])
    for name in names if shutil.which("ncu") and setting.real else ():
        failed += told(lines, setting.sizes.parts[0], [{"policy": name, "ncu": _counters(name)}])
    return 1 if failed else 0


def _us(name: str, shape: Shape, setting: Setting) -> dict[str, float]:
    spec = cache_class(name).spec
    whole, _ = graph_of(spec, shape, layers_of(shape, setting), setting, **(SELECTED if spec.selects else {}))
    return kernel_us(setting, whole)


def _counters(name: str) -> list[dict[str, Any]]:
    """Kernel, metric, unit and value of each of the last launches."""
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), "--kernel-name",
               "regex:^(attend|settle|look|choose)$", "--launch-skip", "4", "--launch-count", "4",
               sys.executable, "-m", "scripts.gpu.parts", name]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=True)
    table = done.stdout[done.stdout.index('"ID"') :].splitlines()
    wanted = ("Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    return [{name: row[name] for name in wanted} for row in csv.DictReader(table)]


def main() -> int:
    """A few steps."""
    setting = Setting.of(toy=False, policies=sys.argv[1], out=None)
    if setting is None:
        return 2
    (spec,) = setting.specs()
    shape = (setting.sizes.selecting if spec.selects else setting.sizes.parts)[0]
    graph_of(spec, shape, 1, setting, **(SELECTED if spec.selects else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
