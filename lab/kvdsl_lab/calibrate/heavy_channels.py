"""The heavy channels of a KV head: the dims that weigh most in products of queries and keys, 1 for these and 0 for the others.

Yang et al., "Post-Training Sparse Attention with Double Sparsity", 2024 (2408.07092): channels are chosen offline, by the mean of
|q_d k_d|. Over all pairs of a query and a key of a text that is the mean of |q_d| times the mean of |k_d|; a KV head's queries are
those of its group, after rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl_lab.eval.recording import Recording


@dataclass
class Magnitudes:
    """The sums of |q| and |k| over a text, float64 [kv_heads, dims] each."""

    query: Tensor
    key: Tensor

    def __add__(self, other: Magnitudes) -> Magnitudes:
        return Magnitudes(self.query + other.query, self.key + other.key)


def seen(found: Recording) -> Magnitudes:
    """What a stretch of text adds."""
    return Magnitudes(found.query[0].double().abs().sum((1, 2)), found.key[0].double().abs().sum(1))


def result(magnitudes: Magnitudes, channels: int) -> Tensor:
    """[kv_heads, dims]: 1 for as many channels, of equal ones the first."""
    weight = magnitudes.query * magnitudes.key
    heaviest = weight.argsort(dim=-1, descending=True, stable=True)[:, :channels]
    return torch.zeros_like(weight).scatter(-1, heaviest, 1.0)
