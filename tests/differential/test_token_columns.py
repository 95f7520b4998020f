"""What a token has by itself is the same on all backends, to the bit; so is who stays where nothing else counts."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

from kvdsl.runtime.torch.numerics import sqrt
from tests.quick import few, paired

from .token_columns import ALONE, SIZES, TOGETHER, check, policy_of, repeated, spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "backend", "size"), paired([*ALONE, *TOGETHER], ["torch", "cpu"], SIZES), ids=str)
def test_columns_are_the_interpreters_to_the_bit(
    name: str, backend: str, size: tuple[torch.dtype, int, int], folder: Path
) -> None:
    spec = spec_of(name, folder)
    check(policy_of(name, folder), repeated(spec, backend, *size))


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "key_dim", "value_dim"), few(SIZES, SIZES[0]), ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_repeated_words_tie_alike_on_every_head(
    name: str, dtype: torch.dtype, key_dim: int, value_dim: int, folder: Path
) -> None:
    """Many tokens are equal, so that one bit decides who stays."""
    spec = spec_of(name, folder)
    kept = [repeated(spec, backend, dtype, key_dim, value_dim).position.sort(-1).values for backend in ("torch", "cpu")]
    assert torch.equal(*kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_roots_are_rounded_correctly(dtype: torch.dtype) -> None:
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(1), dtype=dtype) * 100
    exact = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64)
    assert torch.equal(sqrt(x), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_has_no_root_is_nan_without_a_warning(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sqrt(torch.tensor([-1.0, torch.nan], dtype=dtype)).isnan().all()
