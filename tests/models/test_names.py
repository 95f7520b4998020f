"""`--model NAME`: what is on this machine comes first, a typo is told at once, and nobody is asked without need."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from kvdsl.errors import KvdslError
from kvdsl.models import hub, place_of


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with nothing fetched from the hub."""
    from huggingface_hub import constants

    hub._listens.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("KVDSL_DATA_DIR", str(tmp_path / "data"))
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def model_in(folder: str) -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def refused(name: str) -> str:
    with pytest.raises(KvdslError) as error:
        place_of(name)
    return str(error.value)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Who is connected to: nobody listens."""
    found: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        found.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    return found


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smolm2", "did you mean `smollm2`?"),
        ("SmolLM2", "did you mean `smollm2`?"),
        ("chapter_on", "did you mean `chapter_one`?"),
        ("gpt2", "of the form owner/name"),
        ("", "has no config.json"),
        ("./chapter_on", "did you mean `./chapter_one`?"),
        ("/nowhere/at/all", "there is no model folder"),
        ("~nobody_of_this_name/x", "its home folder is unknown"),
    ],
)
def test_what_is_no_id_is_refused_without_a_question(name: str, told: str, asked: list[tuple[str, int]]) -> None:
    model_in("chapter_one")
    assert told in refused(name)
    assert not asked


def test_an_id_that_cannot_be_asked_for(asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        refused("someone/model") == "the model `someone/model` is not on this machine: the Hugging Face hub does not respond"
    )
    assert asked == [("huggingface.co", 443)]
    model_in("models/mine")
    assert "did you mean `models/mine`? (the Hugging Face hub does not respond)" in refused("models/mime")
    assert len(asked) == 1, "once is enough"
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example:8080")
    refused("someone/model")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    refused("someone/model")
    assert asked[1:] == [("hub.example", 8080), ("proxy.example", 3128)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://other.example")
    refused("someone/model")
    assert len(asked) == 3


def test_what_was_fetched_before_needs_no_hub(asked: list[tuple[str, int]]) -> None:
    for name in ("models--someone--model", "models--gpt2"):
        folder = model_in(f"hub/{name}/snapshots/abc")
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text("abc")
    assert place_of("gpt2").endswith("models--gpt2/snapshots/abc")
    assert not asked
    assert place_of("someone/model").endswith("models--someone--model/snapshots/abc")
    assert len(asked) == 1


def test_a_hub_that_listens_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert place_of("someone/model") == "someone/model"


def test_nobody_waits_for_a_connection_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()

    def hang(*_: object) -> None:
        forever.wait()
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    monkeypatch.setattr(hub, "SECONDS", 0.01)
    assert "does not respond" in refused("someone/model")
    forever.set()
