"""The files of editors/ that are made from the grammar and the table of operations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import make_editors


@pytest.mark.parametrize("name", make_editors.COMMITTED)
def test_files_are_up_to_date(name: str) -> None:
    made = make_editors.COMMITTED[name]()
    assert (make_editors.ROOT / name).read_text(encoding="utf-8") == made, "run scripts/make_editors.py"
