"""How well a few dims tell which tokens matter: SparCas' construction error, mask difference and perplexity, selector by selector.

Queries and keys are those of the full cache, recorded; every `interval`-th query after the prompt finds the sketch anew, and the
queries up to the next one use it. Masks are chosen for a KV head, by what its group's query heads give on average, as the policies
do; the newest token is in every mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval import recording
from kvdsl_lab.eval.recording import Recording

Row = dict[str, Any]
SELECTORS = Path(__file__).with_name("selectors")
BY_DIMS = ("abs_q", "abs_q_plus_mean_k", "mean_k", "product", "token_wise", "random_dims")
"""Selectors of dims. `token_wise` has dims of its own for every token, those with the largest |q| |k|: no policy can say it."""

QUEST, PAGE = "quest", 16
FIRST_LAYER = 2
"""The layers before it stay dense (SparCas, section 4.1)."""


@dataclass(frozen=True)
class Setting:
    """One row: a selector with `dims` dims, found anew every `interval` queries, that choose `tokens` tokens. Quest has no dims."""

    selector: str
    dims: int | None
    tokens: int
    interval: int | None


def settings(
    selectors: Sequence[str], dims: Sequence[int], tokens: Sequence[int], intervals: Sequence[int]
) -> list[Setting]:
    """Every combination that makes a difference.

    Raises:
        KvdslError: if a selector is unknown.
    """
    unknown = [name for name in selectors if name not in (*BY_DIMS, QUEST)]
    if unknown:
        raise KvdslError(f"there is no selector `{unknown[0]}`; choose of {', '.join((*BY_DIMS, QUEST))}")
    made = []
    for name in selectors:
        for count in tokens:
            if name == QUEST:
                made.append(Setting(name, None, count, None))
                continue
            every: Sequence[int | None] = [None] if name == "token_wise" else intervals
            made += [Setting(name, size, count, interval) for size in dims for interval in every]
    return made


def record(model: Any, ids: Tensor) -> list[Recording]:
    """The layers that select, of texts of equal length, [rows, length], in one forward."""
    return recording.record(model, ids, FIRST_LAYER)


# -- errors and differences --------------------------------------------------------------------------------------------


def fidelity(
    recordings: Sequence[Recording], prompt: int, queries: int, setting: Setting, seed: int = 0
) -> tuple[float, float]:
    """The mask difference (eq. 6) and the construction error (eq. 5; NaN where nothing is constructed), means over everything.

    Args:
        queries: how many of the queries after the prompt are looked at, evenly.
    """
    differing, errors = [], []
    make = torch.Generator().manual_seed(seed)
    for layer in recordings:
        length, dim = layer.key.shape[-2:]
        for newest in torch.linspace(prompt, length - 1, queries).long().unique().tolist():
            query, key = layer.query[..., newest, :], layer.key[..., : newest + 1, :]
            exact = torch.einsum("bhgd,bhsd->bhgs", query, key)
            partial = _partial(layer, prompt, newest, setting, make)
            graded = _page_bounds(query, key) if partial is None else partial.mean(2)
            size = PAGE if partial is None else 1
            oracle, chosen = _mask(exact.mean(2), setting.tokens, 1), _mask(graded, setting.tokens, size)
            differing.append((oracle != chosen).double().mean())
            if partial is not None:
                errors.append((exact - partial).abs().double().mean() / math.sqrt(dim))
    error = torch.stack(errors).mean() if errors else torch.tensor(math.nan)
    return float(torch.stack(differing).mean()), float(error)


def _mask(by: Tensor, tokens: int, page: int) -> Tensor:
    """The highest of [..., slots], bool: pages by their highest, of equals the newer, and the newest in any case."""
    slots = by.shape[-1]
    pages = -(-slots // page)
    padded = torch.nn.functional.pad(by, (0, pages * page - slots), value=-torch.inf)
    best = padded.unflatten(-1, (pages, page)).amax(-1)
    best[..., -1] = torch.inf
    count = min(max(1, tokens // page), pages)
    chosen = best.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :count]
    mask = torch.zeros_like(best, dtype=torch.bool).scatter(-1, pages - 1 - chosen, value=True)
    return mask.repeat_interleave(page, -1)[..., :slots]


def _page_bounds(query: Tensor, key: Tensor) -> Tensor:
    """Quest's bound of every token's page, [rows, kv_heads, slots]."""
    low, high = (_of_pages(key, op) for op in (torch.amin, torch.amax))
    query = query.unsqueeze(3)
    bound = torch.maximum(query * low.unsqueeze(2), query * high.unsqueeze(2)).sum(-1).mean(2)
    return bound.repeat_interleave(PAGE, -1)[..., : key.shape[-2]]


def _of_pages(key: Tensor, op: Callable[..., Tensor]) -> Tensor:
    """The extremes of whole pages and of the last, [rows, kv_heads, pages, dim]."""
    return torch.stack([op(part, dim=-2) for part in key.split(PAGE, dim=-2)], -2)


def _partial(layer: Recording, prompt: int, newest: int, setting: Setting, make: torch.Generator) -> Tensor | None:
    """The products over the chosen dims, [rows, kv_heads, group, slots]; None where there are none."""
    query, key = layer.query[..., newest, :], layer.key[..., : newest + 1, :]
    if setting.selector == QUEST:
        return None
    assert setting.dims is not None
    if setting.selector == "token_wise":
        own = (query.abs().mean(2).unsqueeze(-2) * key.abs()).topk(setting.dims, -1).indices
        return torch.einsum("bhgsd,bhsd->bhgs", _at(query, own), key.gather(-1, own))
    assert setting.interval is not None
    refreshed = newest - (newest - (prompt - 1)) % setting.interval
    by = _ranking(setting.selector, layer.query[..., refreshed, :], layer.key[..., : refreshed + 1, :], make)
    dims = by.topk(setting.dims, -1).indices
    few = dims.unsqueeze(-2)
    return torch.einsum(
        "bhgd,bhsd->bhgs", query.gather(-1, few.expand(*query.shape[:3], -1)), key.gather(-1, few.expand(*key.shape[:3], -1))
    )


def _at(query: Tensor, dims: Tensor) -> Tensor:
    """Each token's own dims of the queries: [rows, kv_heads, group, slots, dims]."""
    wide = query.unsqueeze(3).expand(*query.shape[:3], dims.shape[2], query.shape[-1])
    return wide.gather(-1, dims.unsqueeze(2).expand(*wide.shape[:4], dims.shape[-1]))


def _ranking(selector: str, query: Tensor, key: Tensor, make: torch.Generator) -> Tensor:
    """What the dims rank by, [rows, kv_heads, dim]."""
    size, mean = query.abs().mean(2), key.mean(-2).abs()
    if selector == "random_dims":
        return torch.rand(size.shape, generator=make)
    made = {"abs_q": size, "abs_q_plus_mean_k": size + mean, "mean_k": mean, "product": size * key.abs().mean(-2)}
    return made[selector]


# -- perplexity --------------------------------------------------------------------------------------------------------


def perplexity(model: Any, ids: Tensor, prompt: int, setting: Setting, backend: str, tick: Callable[[], None]) -> float:
    """Of what comes after the prompt, token by token; NaN where no policy says what the selector does."""
    if setting.selector == "token_wise":
        return math.nan
    shipped = setting.selector == QUEST
    given = {"tokens": setting.tokens} | ({} if shipped else {"dims": setting.dims, "every": setting.interval})
    cache: Any = load("quest" if shipped else SELECTORS / f"{setting.selector}.kv")(model, backend=backend, **given)
    return text_perplexity(model, ids, prompt, cache, tick)


def full_perplexity(model: Any, ids: Tensor, prompt: int, backend: str, tick: Callable[[], None]) -> float:
    """The same with everything attended to."""
    full: Any = load("full")
    return text_perplexity(model, ids, prompt, full(model, backend=backend), tick)


def text_perplexity(model: Any, ids: Tensor, prompt: int, cache: Any, tick: Callable[[], None]) -> float:
    """The perplexity, through a cache, of every token after the prompt's."""
    ids = ids.to(model.device)
    losses: list[Tensor] = []
    with torch.inference_mode():
        for part in _parts(ids, prompt):
            logits = model(input_ids=part, **with_cache(cache), use_cache=True, logits_to_keep=1).logits.float()[:, -1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, prompt + len(losses)], reduction="none"))
            tick()
    return math.exp(float(torch.stack(losses).double().mean()))


def _parts(ids: Tensor, prompt: int) -> Iterator[Tensor]:
    yield ids[:, :prompt]
    for at in range(prompt, ids.shape[1] - 1):
        yield ids[:, at : at + 1]


def steps(ids: Tensor, prompt: int) -> int:
    """How many forwards a perplexity takes."""
    return ids.shape[1] - prompt


# -- all of it ---------------------------------------------------------------------------------------------------------


def evaluate(
    model: Any,
    ids: Tensor,
    prompt: int,
    wanted: Sequence[Setting],
    *,
    queries: int = 32,
    backend: str = "auto",
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for every setting: `selector, dims, tokens, interval, mask_diff, construction_error, ppl`; None where there is none.

    Args:
        ids: stretches of a text, [rows, length].

    Raises:
        KvdslError: if keys have fewer dims than a setting asks for, or the model has no layer that selects.
    """
    recordings = record(model, ids)
    if not recordings:
        raise KvdslError(f"the first {FIRST_LAYER} layers stay dense, and the model has no others")
    dim = recordings[0].key.shape[-1]
    largest = max((setting.dims or 0 for setting in wanted), default=0)
    if largest > dim:
        raise KvdslError(f"a sketch of {largest} dims is asked for, but keys have {dim}")
    rows = []
    for setting in wanted:
        difference, error = fidelity(recordings, prompt, queries, setting, seed)
        ppl = perplexity(model, ids, prompt, setting, backend, tick)
        rows.append({
            "selector": setting.selector, "dims": setting.dims, "tokens": setting.tokens, "interval": setting.interval,
            "mask_diff": _rounded(difference), "construction_error": _rounded(error), "ppl": _rounded(ppl, 4),
        })  # fmt: skip
    return rows


def _rounded(value: float, digits: int = 6) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Whether the paper's claims hold of these rows: |q| chooses better than mean(K) and random dims, and more dims better.

    Per claim: `holds`, over how many pairs of rows that differ in one thing only, and in how many of these.
    """
    by = {name: _by_rest(rows, name) for name in ("abs_q", "mean_k", "random_dims")}
    ours = by["abs_q"]
    found = {
        f"abs_q below {other}: {measure}": _verdict([
            ours[rest][measure] < by[other][rest][measure] for rest in ours if rest in by[other]
        ])
        for other in ("mean_k", "random_dims")
        for measure in ("mask_diff", "ppl")
    }  # fmt: skip
    ascending = sorted(ours, key=lambda rest: (rest[1:], rest[0]))
    steps = [(less, more) for less, more in pairwise(ascending) if less[1:] == more[1:]]
    falls = [ours[more]["mask_diff"] < ours[less]["mask_diff"] for less, more in steps]
    return found | {"abs_q: mask_diff falls with dims": _verdict(falls)}


def _by_rest(rows: Sequence[Row], selector: str) -> dict[tuple[int, int, int], Row]:
    """A selector's rows by dims, tokens and interval."""
    return {(row["dims"], row["tokens"], row["interval"]): row for row in rows if row["selector"] == selector}


def _verdict(held: Sequence[bool]) -> dict[str, Any]:
    return {"holds": bool(held) and all(held), "pairs": len(held), "held": sum(held)}
