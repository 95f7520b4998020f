"""The statistics that there are, a row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from kvdsl_lab.calibrate import heavy_channels, key_pca, q_filters, query_mean, retrieval_heads, sketches, unrotated
from kvdsl_lab.eval.recording import Recording


def _as_it_is(found: Tensor) -> Tensor:
    return found


@dataclass(frozen=True)
class Statistic:
    """Something that a model's layers tell of a text.

    Attributes:
        name: as `--tensor NAME=STATISTIC` has it.
        doc: one line.
        names: of tensors that mean it, where nothing is said.
        axes: over what it varies, in the order of what `whole` gives.
        twice: whether the text is one that is read twice.
        seen: what a layer's recording of a stretch adds; such parts can be added up.
        result: from the sum of these to one layer's numbers, [kv_heads, ...].
        rotation: whether it asks how the model rotates.
        whole: from all layers' numbers, [layers, kv_heads, ...], to what is written.
    """

    name: str
    doc: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    seen: Callable[[Recording], Any]
    result: Callable[[Any], Tensor]
    twice: bool = False
    rotation: bool = False
    whole: Callable[[Tensor], Tensor] = _as_it_is


_VECTOR, _NUMBER = ("layers", "heads", "dims"), ("layers", "heads")
_OF_GROUP = ("layers", "heads", "group", "dims")


def _by_heads(sinks: int, recent: int) -> dict[str, Any]:
    seen = partial(retrieval_heads.seen, sinks=sinks, recent=recent)
    return {"axes": _NUMBER, "seen": seen, "result": retrieval_heads.result, "twice": True}


def statistics(sinks: int = 16, recent: int = 64, channels: int = 16) -> dict[str, Statistic]:
    """All of them, by name.

    Args:
        sinks, recent: what a streaming head sees.
        channels: how many heavy channels, or principal axes, a KV head has.
    """
    heads = _by_heads(sinks, recent)
    rows = (
        Statistic(
            "q-filters", "the direction along which queries lie (Q-Filters)",
            ("filter", "filters", "q_filter", "q_filters"), _VECTOR, q_filters.seen, q_filters.result,
        ),
        Statistic(
            "query-mean", "the mean query",
            ("query_mean", "centre", "center"), _VECTOR, query_mean.seen, query_mean.result,
        ),
        Statistic(
            "key-pca", "the first principal axis of the keys",
            ("axis", "key_pca"), _VECTOR, key_pca.seen, key_pca.result,
        ),
        Statistic(
            "key-axes", "the first principal axes of the keys (Loki)",
            ("basis", "key_axes"), (*_VECTOR, "rank"), key_pca.seen, partial(key_pca.axes, count=channels),
        ),
        Statistic(
            "query-centres", "each query head's mean query before it is rotated (Expected Attention, TriAttention)",
            ("centre", "center"), _OF_GROUP, unrotated.seen, unrotated.centre, rotation=True,
        ),
        Statistic(
            "query-roots", "a root of the covariance of each query head's queries before they are rotated (Expected Attention)",
            ("root",), (*_OF_GROUP, "rank"), unrotated.seen, unrotated.root, rotation=True,
        ),
        Statistic(
            "query-excess", "how much longer the pairs of a query head's dims are on average than those of the mean query (TriAttention)",
            ("excess",), _OF_GROUP, unrotated.seen_pairs, unrotated.excess, rotation=True,
        ),
        Statistic(
            "random-sketch", "normal numbers over the root of how many there are for each dim (leverage scores)",
            ("sketch",), (*_VECTOR, "rank"), partial(sketches.seen, count=channels), sketches.result, whole=sketches.drawn,
        ),
        Statistic(
            "heavy-channels", "1 for the dims that weigh most in products of queries and keys, else 0 (Double Sparsity)",
            ("channels", "heavy_channels"), _VECTOR, heavy_channels.seen, partial(heavy_channels.result, channels=channels),
        ),
        Statistic(
            "retrieval-heads", "how much a head changes that sees sinks and recent tokens only, as a rank (DuoAttention, approximately)",
            ("retrieval", "retrieval_heads"), whole=retrieval_heads.ranks, **heads,
        ),
        Statistic(
            "streaming-heads", "1 less the rank of retrieval-heads: high where a head needs sinks and recent tokens only",
            ("streaming", "streaming_heads"), whole=lambda changes: 1 - retrieval_heads.ranks(changes), **heads,
        ),
        Statistic(
            "head-importance", "how much a head changes that sees sinks and recent tokens only, 1 on average (HeadKV, approximately)",
            ("importance", "head_importance"), whole=lambda changes: changes / changes.mean(), **heads,
        ),
    )  # fmt: skip
    return {row.name: row for row in rows}
