"""Q-Filters: the direction along which a head's queries lie.

Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", 2025 (2503.02812), section 3: the first right singular
vector of the queries after rotation, with the sign that makes them project positively on it; a key's projection then says what
queries will give it on average, and `score dot(filter, k)` lets those leave that project lowest. A KV head's filter is the mean of
those of its query heads, as in the authors' code.

The files that the authors published hold the opposite direction; a policy that reads them says `score -dot(filter, k)`.
"""

from __future__ import annotations

from torch import Tensor

from kvdsl_lab.calibrate.moments import Moments, oriented, principal
from kvdsl_lab.eval.recording import Recording


def seen(found: Recording) -> Moments:
    """What a stretch of text adds, of every query head: [kv_heads, group] vectors."""
    return Moments.of(found.query[0])


def result(moments: Moments) -> Tensor:
    """[kv_heads, dims]."""
    return oriented(principal(moments.products), moments.total).mean(1)
