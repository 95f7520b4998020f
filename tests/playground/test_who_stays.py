"""Which tokens stay under a policy on the playground's recorded page."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdsl.assets import book_text
from kvdsl.compiler import find_policy, shipped_policies

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "playground"
GALLERY = sorted(path for path in (ROOT / "policies" / "gallery").glob("*.kv") if not path.stem.endswith("_test"))
SMALL = {"tokens": 24, "layers": [0, 3], "heads": 2, "group": 2, "dim": 4}


@pytest.fixture(scope="module")
def who_stays() -> Iterator[Any]:
    sys.path.insert(0, str(SOURCE))
    import who_stays

    yield who_stays
    sys.path.remove(str(SOURCE))
    del sys.modules["who_stays"]


def whole(found: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """What a run gives at last."""
    *earlier, last = found
    known = [one["known"] for one in earlier]
    assert known == sorted(known)
    assert last["done"] == 1
    return last


def small(folder: Path) -> Path:
    """A recording of few and short random vectors."""
    rng, tokens = np.random.default_rng(3), int(SMALL["tokens"])  # type: ignore[call-overload]
    about = json.loads((SOURCE / "recording.json").read_text(encoding="utf-8"))
    about |= SMALL | {"tokens": about["tokens"][:tokens], "rope": about["rope"] | {"inv_freq": [1.0, 0.1]}}
    vectors = len(about["layers"]) * about["heads"] * (about["group"] + 2)
    data = b"".join(
        np.full(about["dim"], 0.02, "<f4").tobytes() + rng.integers(-127, 128, tokens * about["dim"], np.int8).tobytes()
        for _ in range(vectors)
    )
    (folder / "recording.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "recording.bin").write_bytes(data)
    return folder


# -- the recording -------------------------------------------------------------------------------------------------------


def test_the_page_is_the_books(who_stays: Any) -> None:
    assert "".join(who_stays.about()["tokens"]) in book_text("rock_crystal")


def test_the_recording_has_what_it_says(who_stays: Any) -> None:
    about = who_stays.about()
    vectors = len(about["layers"]) * about["heads"] * (about["group"] + 2)
    size = (SOURCE / "recording.bin").stat().st_size
    assert size == vectors * about["dim"] * (4 + len(about["tokens"]))
    assert size < 4 * 2**20


def test_a_heads_vectors_are_at_their_place(who_stays: Any) -> None:
    about, data = who_stays.about(), np.fromfile(SOURCE / "recording.bin", np.uint8)
    tokens, dim = len(about["tokens"]), about["dim"]
    parts = data.reshape(len(about["layers"]), about["heads"], about["group"] + 2, dim * (4 + tokens))
    layer, head = 2, 1
    scale = parts[layer, head, :, : 4 * dim].copy().view("<f4").astype(np.float64)
    vectors = parts[layer, head, :, 4 * dim :].view(np.int8).reshape(-1, tokens, dim) * scale[:, None]
    query, key, value = who_stays.head_of(about["layers"][layer], head)
    np.testing.assert_array_equal(query, vectors[:-2].transpose(1, 0, 2))
    np.testing.assert_array_equal(key, vectors[-2])
    np.testing.assert_array_equal(value, vectors[-1])


# -- runs ----------------------------------------------------------------------------------------------------------------


def asked(who_stays: Any, text: str, prompt: int = 300, **more: Any) -> dict[str, Any]:
    return whole(who_stays.run(who_stays.Asked(text, 16, 1, prompt, {name: str(value) for name, value in more.items()})))


def test_the_full_cache_misses_nothing(who_stays: Any) -> None:
    found = asked(who_stays, find_policy("full").read_text())
    assert found["left"] == [None] * 320
    assert len(found["lost"]) == 20
    assert max(found["lost"]) < 1e-12


def test_a_window_misses_what_lies_before_it(who_stays: Any) -> None:
    found = asked(who_stays, find_policy("window").read_text(), budget=16)
    kept = [position for position, left in enumerate(found["left"]) if left is None]
    assert kept == list(range(304, 320))
    assert found["left"][:284] == [299] * 284, "these leave with the prompt"
    assert found["left"][284:304] == list(range(300, 320)), "these one by one"
    query, key, _ = (np.asarray(x) for x in who_stays.head_of(16, 1))
    logits = query[310] @ key[:311].T / 8
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares = (shares / shares.sum(1, keepdims=True)).mean(0)
    assert found["lost"][10] == pytest.approx(shares[:294].sum(), rel=1e-9), "the query sees itself and the 16 before it"


def test_a_run_shows_what_it_has(who_stays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who_stays, "PATIENCE", 0)
    question = who_stays.Asked(find_policy("window").read_text(), 16, 1, 310, {"budget": "16"})
    first, *later = [json.loads(json.dumps(one)) for one in who_stays.run(question)]
    assert (first["known"], first["lost"]) == (0, [])
    assert [one["known"] for one in later] == list(range(310, 321))
    assert [one["left"].count(None) for one in later] == [320 - 294, *range(25, 15, -1)]
    assert [len(one["lost"]) for one in later] == list(range(11))


def test_another_head_keeps_other_tokens(who_stays: Any) -> None:
    text = find_policy("h2o").read_text()
    by_head = [whole(who_stays.run(who_stays.Asked(text, 16, head, 300, {"budget": "16"})))["left"] for head in (0, 1)]
    assert by_head[0] != by_head[1]


def test_a_policy_that_selects_says_what_is_read(who_stays: Any) -> None:
    found = asked(who_stays, find_policy("quest").read_text(), tokens=64)
    assert found["left"] == [None] * 320
    assert all(64 - 16 <= len(read) <= 64 for read in found["read"])
    assert 0 < max(found["lost"]) < 1


def test_heads_that_share_a_budget_are_run_together(who_stays: Any) -> None:
    found = asked(who_stays, find_policy("adakv").read_text(), budget=32)
    assert not found["alone"]
    assert asked(who_stays, find_policy("h2o").read_text(), budget=32)["alone"]


HEAD = "kv 1\n\npolicy P {\n  param budget = 8\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + "  score postion\n}\n", "has errors"),
        (HEAD + "  given worth\n  score worth\n}\n", "has to give this policy `worth`"),
        ("kv 2\n" + HEAD[5:] + "  input tool from spans\n  score tool\n}\n", "reads `tool`: the recorded text has no spans"),
        ("kv 2\n" + HEAD[5:] + "  score token\n}\n", "reads `token`"),
        (HEAD + "  score position\n  victims shared by layers\n}\n", "all layers decide together"),
        (HEAD + "  budget budget across layers\n  when prefill\n  score position\n}\n", "all layers decide together"),
    ],
)
def test_what_cannot_run_says_why(who_stays: Any, text: str, why: str) -> None:
    who_stays.begin("a", json.dumps({"text": text, "layer": 16, "head": 0, "prompt": 310}))
    assert why in json.loads(who_stays.go_on("a"))["error"]


def test_a_budget_that_is_none(who_stays: Any) -> None:
    text = find_policy("h2o").read_text()
    who_stays.begin("a", json.dumps({"text": text, "layer": 16, "head": 0, "prompt": 310, "params": {"budget": "1.5"}}))
    assert json.loads(who_stays.go_on("a"))["error"].startswith("The budget is 1.5, which is neither")


def test_a_budget_is_tokens_or_a_rate_as_it_is_written(who_stays: Any) -> None:
    text = find_policy("window").read_text()
    kept = {size: asked(who_stays, text, budget=size)["left"].count(None) for size in ("1", "1.0", "0.5", "20")}
    assert kept == {"1": 1, "1.0": 300, "0.5": 150, "20": 20}


# -- without NumPy -------------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.path[:0] = {paths!r}
import plain_numpy
plain_numpy.install()
import json, pathlib
import numpy, who_stays
assert numpy is plain_numpy
who_stays.HERE = pathlib.Path({folder!r})
print(json.dumps([who_stays.answer(json.dumps(one)) for one in json.load(sys.stdin)]))
"""


def compared(who_stays: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, questions: list[dict[str, Any]]) -> None:
    """The same tokens stay, and are read, with NumPy and without it."""
    program = WITHOUT.format(paths=[str(SOURCE), str(ROOT)], folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, input=json.dumps(questions))
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(who_stays, "HERE", folder)
    for cache in (who_stays.about, who_stays.head_of, who_stays.attention):
        cache.cache_clear()
    for question, answer in zip(questions, json.loads(done.stdout), strict=True):
        found, expected = json.loads(answer), json.loads(who_stays.answer(json.dumps(question)))
        assert found | {"lost": None} == expected | {"lost": None}, question["text"]
        assert found.get("lost") == pytest.approx(expected.get("lost"), abs=1e-12)
    for cache in (who_stays.about, who_stays.head_of, who_stays.attention):
        cache.cache_clear()


def questions(paths: Iterable[Path], layer: int, prompt: int, size: int) -> list[dict[str, Any]]:
    params = {"budget": str(size), "tokens": str(size), "dims": "2", "page": "4"}
    return [
        {"text": path.read_text(encoding="utf-8"), "layer": layer, "head": 1, "prompt": prompt, "params": params}
        for path in paths
    ]


def test_without_numpy_the_same_tokens_stay(who_stays: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compared(who_stays, monkeypatch, small(tmp_path), questions(shipped_policies(), layer=3, prompt=8, size=6))


def test_what_needs_more_than_the_stand_in_has_is_refused(tmp_path: Path) -> None:
    """The interpreter may use all of NumPy."""
    program = WITHOUT.format(paths=[str(SOURCE), str(ROOT)], folder=str(small(tmp_path))).replace(
        "print(", "import kvdsl.interp.memory as memory\nmemory.np.where = memory.np.nanquantile\nprint("
    )
    (question,) = questions([find_policy("h2o")], layer=3, prompt=8, size=6)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, input=json.dumps([question]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "its stand-in cannot run this policy: it lacks nanquantile." in json.loads(json.loads(done.stdout)[0])["error"]


@pytest.mark.parametrize("half", [0, 1])
def test_without_numpy_the_gallery_keeps_the_same(
    who_stays: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half: int
) -> None:
    compared(who_stays, monkeypatch, small(tmp_path), questions(GALLERY[half::2], layer=3, prompt=8, size=6))


@pytest.mark.parametrize("name", ["roco", "quest"])
def test_without_numpy_the_same_tokens_stay_of_the_page(who_stays: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One that evicts and one that selects; of fewer numbers all are tried above."""
    compared(who_stays, monkeypatch, SOURCE, questions([find_policy(name)], layer=16, prompt=96, size=64))
