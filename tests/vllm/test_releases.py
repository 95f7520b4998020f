"""Which releases of vLLM serve: those that were tested, and newer ones that have all that kvdsl uses."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs this in an environment that has vLLM")
import vllm

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm import interfaces, releases

NEWER = "99.1.0+cpu"


@pytest.fixture(autouse=True)
def fresh() -> None:
    releases._missing.cache_clear()
    releases._warn.cache_clear()


def test_this_release_was_tested_and_has_what_is_used() -> None:
    assert releases.tested(vllm.__version__)
    assert interfaces.missing() == []


def test_a_newer_one_that_has_it_serves_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.kvdsl"), "warning", lambda text, *words: said.append(text % words))
    for _ in range(2):
        releases.refuse_release(NEWER)
    (told,) = said
    assert told.startswith(
        f"kvdsl was tested in vLLM {', '.join(releases.RELEASES)}, not in {NEWER}, which has all that it uses: "
    )


@pytest.mark.parametrize(
    ("module", "name", "used", "told"),
    [
        ("vllm.no_such_module", "Any", "", "vllm.no_such_module"),
        ("vllm.v1.request", "Request.no_such_name", "", "vllm.v1.request.Request.no_such_name"),
        ("vllm.v1.kv_cache_interface", "replace_as", "drop keep", "vllm.v1.kv_cache_interface.replace_as: keep"),
        ("vllm.v1.kv_cache_interface", "FullAttentionSpec", "slots", "vllm.v1.kv_cache_interface.FullAttentionSpec: slots"),
    ],
)
def test_a_newer_one_that_lacks_something_is_refused_by_name(
    module: str, name: str, used: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "USED", {module: {name: used}})
    with pytest.raises(KvdslError, match=rf"99\.1\.0.*has changed what it uses \({told}\)"):
        releases.refuse_release(NEWER)
