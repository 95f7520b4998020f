"""What attacks on builds share: processes that build and use a policy, and a compiler that takes a tenth of a second.

This process imports everything once and forks for each trial, so that a trial is a process of its own and still starts at once. It
must never run an OpenMP region itself: a child of one that did hangs.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvdsl.build.lock import LOCK, MAKING
from kvdsl.build.store import flaw

POLICY = "roco"
PATIENCE = 120.0
"""Seconds after which a process counts as hanging."""

# Copies what a real compiler made, in pieces: builds that take a tenth of a second, with the bytes of real ones.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "g++, copied"; exit; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
from=STORE/$(basename "$out")
pieces=4
size=$(($(stat -c %s "$from") / pieces + 1))
: > "$out" || exit 1
for piece in 0 1 2 3; do
  tail -c +$((piece * size + 1)) "$from" | head -c $size >> "$out" || exit 1
  sleep 0.02
done
chmod +x "$out"
"""


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        code: its exit status, negative for a signal.
        said: what it gave back; for an exception its type and text.
        seconds: how long it ran.
    """

    code: int
    said: Any
    seconds: float

    @property
    def refused(self) -> bool:
        """Whether it ended with an error as users are to see it: one line that says what to do."""
        return self.code == 1 and self.said[0] == "KvdslError" and "\n" not in self.said[1] and "; " in self.said[1]


class Process:
    """A fork of this process that calls a function; its temporary folder is the trial's."""

    def __init__(self, function: Callable[[], Any], place: Path, **environment: str) -> None:
        self.begun, self.result = time.monotonic(), place / f"result-{time.monotonic_ns()}"
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()  # so that a kill can take its compilers along
            self._run(function, place, environment)

    def _run(self, function: Callable[[], Any], place: Path, environment: dict[str, str]) -> None:
        code = 1
        try:
            os.environ.update({"KVDSL_CACHE_DIR": str(place / "cache"), "TMPDIR": str(place / "tmp")} | environment)
            (place / "tmp").mkdir(exist_ok=True)
            tempfile.tempdir = None
            with open(place / "said", "a", buffering=1) as log:
                os.dup2(log.fileno(), 2)
            said: Any = function()
            code = 0
        except BaseException as error:
            traceback.print_exc()
            said = (type(error).__name__, str(error))
        with suppress(OSError):
            self.result.write_text(json.dumps(said))
        os._exit(code)

    def kill(self, everything: bool) -> None:
        """Kill -9, with all that it started or alone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL) if everything else os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Outcome:
        """Its end."""
        while (ended := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() - self.begun > PATIENCE:
                self.kill(everything=True)
                os.waitpid(self.pid, 0)
                raise RuntimeError(f"a process hung for {PATIENCE:.0f} s")
            time.sleep(0.005)
        seconds = time.monotonic() - self.begun
        said = json.loads(self.result.read_text()) if self.result.exists() else None
        self.result.unlink(missing_ok=True)
        return Outcome(os.waitstatus_to_exitcode(ended[1]), said, seconds)


def build() -> list[str]:
    """Load the policy by name and build its kernels: the files of that."""
    import kvdsl
    from kvdsl.build.cxx import driver_objects, kernel_library

    spec: Any = kvdsl.load(POLICY).spec
    library = kernel_library(spec.cpu_source, spec.stem)
    return [str(file) for file in (*driver_objects(), library)]


def decode(backend: str = "cpu") -> list[float]:
    """What `build` does, and decode with it: some logits of a small random model."""
    import torch
    import transformers

    import kvdsl
    from kvdsl.runtime.hf.versions import with_cache

    torch.set_num_threads(1)  # nothing here is large, and the machine may be busy
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    with torch.no_grad():
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        ).eval()
        tokens = torch.randint(32, (1, 20))
        cache = kvdsl.load(POLICY)(model, budget=8, backend=backend)
        steps = (tokens[:, :12], *tokens[:, 12:].unbind(1))
        logits = [model(step.view(1, -1), **with_cache(cache)).logits[0, -1] for step in steps]
    return [float(x) for x in torch.cat(logits)]


@contextmanager
def trial_folder() -> Iterator[Path]:
    """An empty folder, on a disk."""
    folder = Path(tempfile.mkdtemp(prefix="kvdsl-torture-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import_everything() -> None:
    """Once, for all that are forked."""
    for module in (
        "transformers.models.llama",
        "kvdsl.runtime.hf",
        "kvdsl.runtime.cpu.backend",
        "kvdsl.emit",
        "lark",
    ):
        importlib.import_module(module)


@lru_cache
def expected() -> list[float]:
    """The logits of the torch backend."""
    _import_everything()
    with trial_folder() as folder:
        outcome = Process(lambda: decode("torch"), folder).wait()
    assert outcome.code == 0, outcome.said
    return list(outcome.said)


def check_right(outcome: Outcome) -> None:
    """Fail unless the process gave the right logits."""
    assert outcome.code == 0, f"ended with {outcome.code}: {outcome.said}"
    apart = max(abs(one - two) for one, two in zip(outcome.said, expected(), strict=True))
    assert apart < 1e-3, f"the logits differ by {apart:.2g}"


def check_clean(place: Path) -> None:
    """Fail unless all that lies in the cache folder is sound entries, and nothing lies in the folder for temporary files."""
    for kind in (place / "cache").iterdir():
        for entry in kind.iterdir():
            if entry.suffix not in (".log", LOCK):  # what a compiler said when it failed
                assert MAKING not in entry.name, f"{entry.name} is left, with {[path.name for path in entry.rglob('*')]}"
                assert (found := flaw(entry)) is None, f"{entry.name}: {found}"
    left = [path.name for path in (place / "tmp").iterdir()]
    assert not left, f"temporary files are left: {', '.join(left)}"


@lru_cache
def fast_compiler() -> str:
    """The command of a compiler that copies what the real one made of the policy; made once a process."""
    _import_everything()
    store = Path(tempfile.mkdtemp(prefix="kvdsl-torture-store-"))
    atexit.register(shutil.rmtree, store, ignore_errors=True)
    with trial_folder() as folder:
        cache = os.environ.get("KVDSL_CACHE_DIR", "")  # the user's: a real build takes a while
        outcome = Process(build, folder, KVDSL_CACHE_DIR=cache).wait()
    assert outcome.code == 0, outcome.said
    for file in outcome.said:
        shutil.copy(file, store)
    command = store / "g++"
    command.write_text(FAKE.replace("STORE", str(store)))
    command.chmod(0o755)
    return str(command)
