"""The first principal axis of a head's keys after rotation, of length 1, or the first few.

Singhania et al., "Loki: Low-rank Keys for Efficient Sparse Attention", 2024 (2406.02542): keys lie in few dims. Of the two directions of an
axis it is the one on which the mean key projects positively.
"""

from __future__ import annotations

from torch import Tensor

from kvdsl_lab.calibrate.moments import Moments, oriented, principal, principals
from kvdsl_lab.eval.recording import Recording


def seen(found: Recording) -> Moments:
    """What a stretch of text adds, [kv_heads] vectors."""
    return Moments.of(found.key[0])


def result(moments: Moments) -> Tensor:
    """[kv_heads, dims]."""
    return oriented(principal(moments.covariance), moments.total)


def axes(moments: Moments, count: int) -> Tensor:
    """The first `count` of them, at most as many as there are: [kv_heads, dims, count]."""
    found = principals(moments.covariance, count).transpose(-1, -2)
    return oriented(found, moments.total.unsqueeze(-2)).transpose(-1, -2)
