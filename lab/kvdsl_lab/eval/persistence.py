"""How the deviation of the attention that a token receives develops while the token ages (RoCo, section 4.3 and figure 3).

The paper's "persistence of attention robustness": the standard deviation rises for a few queries, then declines steadily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl_lab.eval.recording import Recording, record

Row = dict[str, Any]
BRIEF = 50
"""The paper: for many tokens the deviation ascends for no more than so many steps."""


def deviations(attn: Tensor, life: int) -> Tensor:
    """The standard deviation of what a token received from its first 1, 2, ..., `life` queries, its own included.

    Args:
        attn: [..., length, length], queries by tokens, causal.

    Returns:
        float64 [..., length - life + 1, life]: the tokens that live that long, by the number of queries.
    """
    length = attn.shape[-1]
    born = torch.arange(length - life + 1, device=attn.device)[:, None]
    queries = born + torch.arange(life, device=attn.device)
    received = attn.transpose(-1, -2)[..., : len(born), :].gather(-1, queries.expand(*attn.shape[:-2], -1, -1)).double()
    count = torch.arange(1, life + 1, device=attn.device)
    mean = received.cumsum(-1) / count
    return (received.square().cumsum(-1) / count - mean.square()).clamp(min=0).sqrt()


def summary(deviation: Tensor) -> Row:
    """What figure 3 shows, of one KV head's tokens.

    Args:
        deviation: [tokens, life], as `deviations` gives it.

    Returns:
        `peak`: the median number of queries after which the deviation is highest; `brief`: the share of tokens for which that is
        at most `BRIEF`; `falling`: the share of steps after the peak at which it falls; `left`: the median of what is left of the
        peak at the end; `curve`: the mean deviation by number of queries.
    """
    highest, at = deviation.max(-1)
    after = torch.arange(1, deviation.shape[-1], device=deviation.device) > at[:, None]
    falls = (deviation.diff(dim=-1) < 0) & after
    steps = int(after.sum())
    return {
        "peak": int(at.median()) + 1, "brief": round(float((at < BRIEF).double().mean()), 4),
        "falling": round(int(falls.sum()) / steps, 4) if steps else None,
        "left": round(float((deviation[:, -1] / highest.clamp(min=1e-30)).median()), 4),
        "curve": [float(f"{value:.4g}") for value in deviation.mean(0).tolist()],
    }  # fmt: skip


def lives(model: Any, ids: Tensor, life: int, tick: Callable[[], None] = lambda: None) -> list[Row]:
    """One row for every layer and KV head: `layer, head, tokens`, and what `summary` says.

    Args:
        ids: stretches of a text, [rows, length].
        life: for how many queries a token is followed.

    Raises:
        KvdslError: if a stretch is too short.
    """
    length = ids.shape[1]
    if not 2 <= life < length:
        raise KvdslError(
            f"a life of {life} queries does not fit into {length} tokens; give longer stretches or a shorter life"
        )
    rows = []
    for layer, found in enumerate(record(model, ids)):
        each = _each_head(found, life)
        rows += [
            {"layer": layer, "head": head, "tokens": len(deviation), **summary(deviation)}
            for head, deviation in enumerate(each)
        ]
        tick()
    return rows


def _each_head(found: Recording, life: int) -> list[Tensor]:
    """Per KV head the deviations of all stretches' tokens, [tokens, life]; the attention of one stretch at a time is held."""
    rows = [deviations(one.attention(0, one.length)[0], life) for one in found.rows()]
    return list(torch.cat(rows, 1))


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Figure 3's two claims, over layers and KV heads: half of the tokens or more ascend briefly, and then mostly decline."""
    brief, falling = [row["brief"] >= 0.5 for row in rows], [(row["falling"] or 0) > 0.5 for row in rows]
    return {
        f"at least half of the tokens peak within {BRIEF} queries": _verdict(brief),
        "after the peak more steps fall than rise": _verdict(falling),
    }


def _verdict(held: Sequence[bool]) -> dict[str, Any]:
    return {"holds": all(held), "heads": len(held), "held": sum(held)}
