"""Safetensors files, read and written without the library of that name, and as it does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from kvdsl.errors import KvdslError
from kvdsl.interp.inputs import values
from kvdsl.tensorfile import Stored, read, written

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_library_writes_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    save_file({"a": torch.zeros(7), "b": tensor, "ids": torch.arange(3)}, tmp_path / "f.safetensors", metadata={"a": "b"})
    found = read(tmp_path / "f.safetensors", ["b"])
    assert found.keys() == {"b"}
    np.testing.assert_array_equal(values(found["b"]), tensor.float().double().numpy())


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    stored = {name: Stored("F32", (2,), np.array([1, value], "<f4").tobytes()) for name, value in (("b", 2), ("a", 3))}
    content = written(stored)
    assert content == written(dict(reversed(stored.items())))
    assert {name: x.tolist() for name, x in load(content).items()} == {"a": [1, 3], "b": [1, 2]}
    (tmp_path / "f").write_bytes(content)
    assert read(tmp_path / "f", ["a", "b"]) == stored


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 100, "is not a safetensors file"),
        (b"PK\x03\x04 not a zip", "is not a safetensors file"),
        (with_header([1]), "is not a safetensors file"),
        (with_header({"b": ENTRY}), "has no tensor `a`; it has `b`"),
        (with_header({}), "it has none"),
        (with_header({"a": ENTRY | {"dtype": "I64"}}), "`a` in `{}` is I64; policies read F64, F32, F16, BF16"),
        (with_header({"a": ENTRY}, bytes(7)), "is damaged"),
        (with_header({"a": ENTRY | {"shape": [3]}}, bytes(8)), "is damaged"),
        (with_header({"a": ENTRY | {"shape": [-2]}}, bytes(8)), "is damaged"),
        (with_header({"a": ENTRY | {"data_offsets": [-8, 0]}}, bytes(8)), "is damaged"),
        (with_header({"a": {"dtype": "F32"}}), "is damaged"),
        (with_header({"a": 3}), "is damaged"),
    ],
)
def test_what_is_no_such_file_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(KvdslError) as raised:
        read(path, ["a"])
    assert message.format(path) in str(raised.value)


def test_a_missing_file_and_a_folder_are_said(tmp_path: Path) -> None:
    with pytest.raises(KvdslError, match="there is no file"):
        read(tmp_path / "f.safetensors", ["a"])
    with pytest.raises(KvdslError, match="cannot read"):
        read(tmp_path, ["a"])
