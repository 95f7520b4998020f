"""Records of what policies keep, and their comparison with the present."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvdsl.runtime.torch.backend import TorchBackend

from .machines import BACKENDS, Places, Seen, built, compiled, interpreted, served
from .texts import TEXTS, Subject, subject

Record = dict[str, Any]
"""Of a policy: `set`, `layers` and `seed` say how it ran, `served` by which backends, and `texts` what was seen, by text:

`forwards`: of each prompt who stayed, of each token after it who left, as positions of each KV head, layer by layer (`0..3,7/2..8`), or
once where it is the same of all; `reads`: digests of what the tokens attended to, and `last` the last one's positions, of a policy that
selects.
"""

SHAKEN, SEEDS = 1e-5, 20
"""What a record may not hang on: a change of all inputs in this proportion; and how many seeds are tried for it."""

OUT_TOLERANCE = 1e-4
"""How far outputs may lie from the interpreter's. That of a token that attends to another slot is off by a hundredth at least."""

TRITON_FORWARDS, TRITON_TEXTS = 4, ("48", "176")
"""In Triton's interpreter a token takes a tenth of a second and more: the first forwards of the shortest and of the longest prompt."""


class UnstableError(Exception):
    """No seed gives texts in which nothing hangs on rounding."""


# -- recording -----------------------------------------------------------------------------------------------------------


def record(stems: Sequence[str]) -> dict[str, Record]:
    """Records of policies, by stem."""
    return {stem: _record(stem) for stem in stems}


def _record(stem: str) -> Record:
    said: list[str] = []
    for seed in range(SEEDS):
        one = subject(stem, seed)
        package = compiled(one)
        made = {text: interpreted(one, text) for text in TEXTS}
        found: Record = {
            "set": dict(one.settings),
            "layers": one.layers,
            "seed": seed,
            "served": [backend for backend in BACKENDS if package.serves(backend)],
            "texts": {text: _written(text, seen) for text, seen in made.items()},
        }
        torch = {stem: (TorchBackend(), package.spec)}
        said = [line for shaken in (0.0, SHAKEN) for line in differing(found, one, {"torch": torch}, made, shaken)]
        if not said:
            return found
    raise UnstableError(
        f"{stem}: with each of {SEEDS} seeds what stays hangs on rounding" + "".join(f"\n  {x}" for x in said)
    )


def _machines(subjects: Sequence[Subject], backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By backend and stem what serves a policy, with its spec."""
    packages = {one.stem: compiled(one) for one in subjects}
    return {
        backend: {stem: (machine, packages[stem].spec) for stem, machine in built(backend, packages).items()}
        for backend in backends
    }


# -- comparing -----------------------------------------------------------------------------------------------------------


def compare(records: Mapping[str, Record], backends: Sequence[str], texts: Sequence[str]) -> dict[str, list[str]]:
    """What is not as it was recorded, in lines, by stem."""
    subjects: dict[str, Subject] = {}
    found: dict[str, list[str]] = {}
    for stem, known in records.items():
        one = Subject(stem, known["set"], known["layers"], known["seed"])
        try:
            compiled(one)
        except Exception as error:
            found[stem] = [f"cannot be compiled any more: {_one_line(error)}"]
        else:
            subjects[stem] = one
    machines = _machines(list(subjects.values()), backends)
    for stem, one in subjects.items():
        known = records[stem] | {"texts": {text: records[stem]["texts"][text] for text in texts}}
        found[stem] = [
            f"has lost its kernels for {backend}"
            for backend in backends
            if backend in known["served"] and stem not in machines[backend]
        ]
        found[stem] += differing(known, one, machines, {})
    return {stem: lines for stem, lines in found.items() if lines}


def differing(
    known: Record,
    one: Subject,
    machines: Mapping[str, Mapping[str, Any]],
    made: Mapping[str, list[Seen]],
    shaken: float = 0.0,
) -> Iterator[str]:
    """What differs from the record, text by text, in the interpreter and on backends.

    Args:
        made: what the interpreter is known to do, by text.
        shaken: by how much, in proportion, what comes in differs on backends.
    """
    for text, told in known["texts"].items():
        meant = made.get(text) or []
        runs = [] if meant else [("interpreter", partial(interpreted, one, text))]
        for backend, by_stem in machines.items():
            if one.stem in by_stem and (backend != "triton" or text in TRITON_TEXTS):
                most = TRITON_FORWARDS if backend == "triton" else None
                runs.append((backend, partial(served, one, text, *by_stem[one.stem], most, shaken)))
        for name, run in runs:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    seen = run()
            except Exception as error:
                yield f"text {text}, {name}: {_one_line(error)}"
                continue
            meant = meant or seen
            problem = _first_difference(text, told, seen, selects=name == "interpreter") or _output_problem(meant, seen)
            if problem:
                yield f"text {text}, {name}: {problem}"


def _first_difference(text: str, told: Record, seen: Sequence[Seen], *, selects: bool) -> str | None:
    """Where a run leaves what was recorded, and with which tokens."""
    reads = told.get("reads", "").split()
    for number, (before, now) in enumerate(zip(_kept(text, told, len(seen[0].kept)), seen, strict=False)):
        tokens = sum(TEXTS[text][: number + 1])
        for head, (old, new) in enumerate(zip(before, now.kept, strict=True)):
            if old != {*new}:
                gone, come = (_runs(sorted(one)) or "nothing" for one in (old - {*new}, {*new} - old))
                place = f"forward {number} ({tokens} tokens so far), head {head} of {len(before)}"
                return f"{place}: kept {gone}, keeps {come} in their place"
        if selects and reads and (_digest(now.read) if now.read else "-") != reads[number]:
            last = f", was {told['last']}" if number == len(reads) - 1 else ""
            return f"forward {number}: attends to other tokens: {_line(now.read)}{last}"
    return None


def _output_problem(meant: Sequence[Seen], seen: Sequence[Seen]) -> str | None:
    for number, (one, other) in enumerate(zip(meant, seen, strict=False)):
        off = float(np.abs(one.out - other.out).max())
        if not off <= OUT_TOLERANCE:
            return f"forward {number}: the output is off by {off:.2g}"
    return None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- the record's form ---------------------------------------------------------------------------------------------------


def _written(text: str, seen: Sequence[Seen]) -> Record:
    forwards, before = [], seen[0].kept
    for tokens, one, number in zip(TEXTS[text], seen, range(len(seen)), strict=True):
        newest = sum(TEXTS[text][:number])
        left = tuple(tuple(sorted({*old, newest} - {*new})) for old, new in zip(before, one.kept, strict=True))
        forwards.append(_line(one.kept if tokens > 1 else left))
        before = one.kept
    made: Record = {"forwards": forwards}
    if any(one.read for one in seen):
        made |= {"reads": " ".join(_digest(one.read) if one.read else "-" for one in seen), "last": _line(seen[-1].read)}
    return made


def _kept(text: str, told: Record, heads: int) -> Iterator[list[set[int]]]:
    """Who stayed after each forward, by head, out of a record."""
    kept: list[set[int]] = []
    for number, (tokens, line) in enumerate(zip(TEXTS[text], told["forwards"], strict=True)):
        places = [_places(part) for part in line.split("/")]
        places = places * (heads if len(places) == 1 else 1)
        newest = {sum(TEXTS[text][:number])}
        kept = places if tokens > 1 else [(own | newest) - left for own, left in zip(kept, places, strict=True)]
        yield kept


def _line(places: Places) -> str:
    parts = [_runs(own) for own in places]
    return parts[0] if len({*parts}) == 1 else "/".join(parts)


def _runs(positions: Sequence[int]) -> str:
    """Ascending positions as runs: `0..3,7`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def _places(runs: str) -> set[int]:
    ends = [run.split("..") for run in runs.split(",") if run]
    return {position for run in ends for position in range(int(run[0]), int(run[-1]) + 1)}


def _digest(places: Places) -> str:
    return hashlib.sha256(_line(places).encode()).hexdigest()[:8]
