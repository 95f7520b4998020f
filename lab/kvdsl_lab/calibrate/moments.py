"""Sums over vectors that come in parts: means and principal directions follow from them, and memory does not grow with the text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Of vectors [..., count, dim], as many as have come.

    Attributes:
        count: how many came, of each.
        total: their sum, float64 [..., dim].
        products: the sum of their outer products, float64 [..., dim, dim].
    """

    count: int
    total: Tensor
    products: Tensor

    @staticmethod
    def of(vectors: Tensor) -> Moments:
        """Of these, [..., count, dim]."""
        exact = vectors.double()
        return Moments(vectors.shape[-2], exact.sum(-2), exact.transpose(-1, -2) @ exact)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.products + other.products)

    @property
    def mean(self) -> Tensor:
        """[..., dim]."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Of the population, [..., dim, dim]."""
        return self.products / self.count - self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)


def principal(matrix: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue of a symmetric matrix, [..., dim, dim]: [..., dim], of length 1.

    Of a matrix of second moments it is the first right singular vector of what came.
    """
    vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return vectors[..., -1]


def principals(matrix: Tensor, count: int) -> Tensor:
    """The eigenvectors of the `count` largest eigenvalues, the largest first: [..., dim, count]."""
    vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return vectors.flip(-1)[..., :count]


def oriented(direction: Tensor, mean: Tensor) -> Tensor:
    """The direction, or its opposite, on which the mean projects positively; [..., dim] both."""
    positive = (direction * mean).sum(-1, keepdim=True) >= 0
    return torch.where(positive, direction, -direction)
