"""Models that turn no keys: without positions, and with a bias that grows with the distance (table 4, appendix B.3).

The paper switches the rotation of Llama off and times StreamingLLM; of biases it has a theorem. Here both models are timed, and both
are asked whether a policy in place says what it says with a cache that is shifted for every token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.reproduce.equip.common import BIASED, NAMES, NO_POSITIONS, named, prompt, unrotated
from kvdsl_lab.reproduce.equip.races import LLAMA, TOY, race, race_table
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup, all_of

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = (NO_POSITIONS, BIASED)

# -- Table 4 -----------------------------------------------------------------------------------------------------------

_PAPERS_SPEEDUPS = {512: 1.182, 768: 1.253, 1024: 1.284}
"""Llama 2 7B by cache size, on an MI210."""


def _speed_cells(setup: Setup, kind: str) -> Iterator[Cell]:
    for budget in setup.size(tuple(_PAPERS_SPEEDUPS), (16, 24)):
        yield Cell(f"{kind}, cache {budget}", partial(_speed, kind=kind, budget=budget))


def _speed(setup: Setup, kind: str, budget: int) -> list[Row]:
    """A token's time in place and with both baselines, in turns; with how many processes wanted a core meanwhile."""
    row = race(setup, "streaming_llm", setup.size(LLAMA, TOY), setup.size(8, 2), budget, kind=kind)
    return [{"positions": kind, **row, "load": round(os.getloadavg()[0], 1)}]


def _speed_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {"positions": row["positions"], **shown, "load": row["load"], "paper": _PAPERS_SPEEDUPS.get(row["budget"])}
        for row, shown in zip(rows, race_table(rows), strict=True)
    ]


_WAYS = {"over_published": "shift and append as published", "over_shift": "shift and append done well"}


def _speed_findings(rows: Sequence[Row]) -> list[Finding]:
    """Beside each baseline; what the quartiles leave open is open, for the times of a busy machine scatter."""
    own = sorted(rows, key=lambda row: row["budget"])
    found = []
    for name, way in _WAYS.items():
        told = ", ".join(
            f"{row[name]:.3g}x ({row[name + '_q1']:.3g} to {row[name + '_q3']:.3g}) at {row['budget']}" for row in own
        )
        told += f"; up to {max(row['load'] for row in own):.0f} processes wanted a core meanwhile"
        first, last = own[0], own[-1]
        faster = all_of([_beyond(row[name + "_q1"] - 1, row[name] - 1) for row in own])
        grows = _beyond(last[name + "_q1"] - first[name + "_q3"], last[name] - first[name])
        known = rows[0]["model"] != TOY
        claim = f"{first['positions']}: StreamingLLM in place is faster than {way} with every cache size"
        found.append(Finding(claim, faster if known else None, told))
        found.append(
            Finding(f"{first['positions']}, beside {way}: the more so the larger the cache", grows if known else None, told)
        )
    return found


def _beyond(least: float, median: float) -> bool | None:
    """Whether a difference is positive; open if its median is, and not the least that the quartiles allow."""
    return True if least > 0 else False if median <= 0 else None


TABLE4 = Experiment(
    "table4", "StreamingLLM in place where no keys are turned, by cache size", "Table 4", partial(_speed_cells, kind=NO_POSITIONS),
    says="1.182, 1.253 and 1.284 times as fast for Llama 2 7B without rotation (MI210).",
    findings=_speed_findings, table=_speed_table,
)  # fmt: skip

BIASED_SPEED = Experiment(
    "biased", "The same with a bias that grows with the distance", "Appendix B.3", partial(_speed_cells, kind=BIASED),
    says="nothing was timed.", findings=_speed_findings, table=_speed_table,
)  # fmt: skip

# -- Appendices B.3 and D.7 --------------------------------------------------------------------------------------------

_PLACES = {"streaming_llm": {"sinks": 4}, "equip_h2o": {"recent": 32}}


def _equal_cells(_: Setup) -> Iterator[Cell]:
    for kind in _KINDS:
        for policy in _PLACES:
            yield Cell(f"{kind}, {NAMES[policy]}", partial(_equal, kind=kind, policy=policy))


def _equal(setup: Setup, kind: str, policy: str) -> list[Row]:
    """Greedy text in place, then the same tokens through both shifted caches."""
    from kvdsl.loading import load
    from kvdsl_lab.bench.shifting import ShiftedCache

    model, other = _pair(setup, kind)
    budget, length, steps = setup.size((64, 96, 200), (16, 24, 8))
    given = {"budget": budget, **(_PLACES[policy] if not setup.quick else {})}
    made: Any = load(policy)
    ids = prompt(setup, model, 2 * length).view(2, length)
    said, ours = _greedy(model, made(model, backend=setup.backend, **given), ids, steps)
    rows = []
    for way, fresh in (("shift done well", False), ("as published", True)):
        theirs = _told(other, ShiftedCache(other, made.spec, given, fresh=fresh), ids, said)
        spread = float((theirs - theirs.mean(-1, keepdim=True)).norm())
        rows.append({
            "positions": kind, "policy": policy, "beside": way, "budget": budget, "tokens": said.numel(),
            "same_tokens": int((theirs.argmax(-1) == said).sum()), "deviation": float(f"{float((ours - theirs).norm()) / spread:.2g}"),
        })  # fmt: skip
    return rows


@lru_cache(1)
def _pair(setup: Setup, kind: str) -> tuple[Any, Any]:
    """A small model with random weights, in float32, for policies in place, and the same for shifted caches."""
    from kvdsl_lab.bench.shifting import twin

    model = unrotated(setup, "tiny:4", "fp32", kind)
    return model, twin(model)


def _greedy(model: Any, cache: Any, ids: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Tokens, [rows, steps], and the logits by which they were chosen, [rows, steps, vocabulary]."""
    import torch

    tokens, told = [], []
    with torch.inference_mode():
        for _ in range(steps):
            told.append(model(input_ids=ids, **with_cache(cache), use_cache=True).logits[:, -1])
            tokens.append(ids := told[-1].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1), torch.stack(told, 1)


def _told(model: Any, cache: Any, ids: Tensor, said: Tensor) -> Tensor:
    """The logits before each of these tokens, [rows, steps, vocabulary]."""
    import torch

    with torch.inference_mode():
        parts: list[Tensor] = [ids, *said[:, :-1].split(1, dim=1)]  # type: ignore[no-untyped-call]
        return torch.stack([model(input_ids=x, **with_cache(cache), use_cache=True).logits[:, -1] for x in parts], 1)


_ROUNDING = 1e-5
"""Of float32 logits, relative to their spread."""


def _equal_findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for kind in _KINDS:
        own = [row for row in rows if row["positions"] == kind]
        same, tokens, worst = (
            f(row[name] for row in own) for f, name in ((sum, "same_tokens"), (sum, "tokens"), (max, "deviation"))
        )
        claim = f"{kind}: policies in place give the tokens and the logits of shift and append (to 1e-5)"
        told = f"{same} of {tokens} tokens, logits within {worst:.1g}"
        found.append(Finding(claim, same == tokens and worst <= _ROUNDING, told))
    return found


EQUAL = Experiment(
    "equal", "In place beside shift and append where no keys are turned", "Appendices B.3 and D.7", _equal_cells,
    says="attention is the same whatever the order of keys, values and the mask or bias; every generated token is the same.",
    findings=_equal_findings, table=named,
)  # fmt: skip
