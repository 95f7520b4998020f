"""The mean query of a KV head, over its query heads and the text, after rotation: what attention asks for on average."""

from __future__ import annotations

from torch import Tensor

from kvdsl_lab.calibrate.moments import Moments
from kvdsl_lab.eval.recording import Recording


def seen(found: Recording) -> Moments:
    """What a stretch of text adds, [kv_heads] vectors."""
    return Moments.of(found.query[0].flatten(1, 2))


def result(moments: Moments) -> Tensor:
    """[kv_heads, dims]."""
    return moments.mean
