"""The page of `kvdsl trace` in a real browser: what a reader sees when he moves the slider and points at tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvdsl
from kvdsl.generation.models import encode
from kvdsl_lab.eval import trace as tracing
from tests.eval.browser import CHROMIUM, DRIVER, Browser, browser

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)

BUDGET, NEW, HEADS = 9, 6, 4


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture
def made(model: Any, tokenizer: Any) -> tracing.Trace:
    prompt = encode(tokenizer, "Once upon a time, in a house by the sea, there lived an old captain.")
    cache: Any = kvdsl.load("roco")(model, budget=BUDGET, backend="torch")
    return tracing.trace(model, prompt, NEW, cache, chunk=7)


@pytest.fixture
def page(made: tracing.Trace, tokenizer: Any, tmp_path: Path) -> Path:
    facts = {"policy": "RoCo", "expression": "mean(attn)", "settings": "<b>", "model": "m", "environment": {"kvdsl": "0"}}
    path = tmp_path / "page.html"
    path.write_text(tracing.page({**facts, **tracing.as_data(made, tokenizer)}), encoding="utf-8")
    return path


def gone(made: tracing.Trace, token: int, step: int, head: int | None = None) -> int:
    left = made.gone[:, :, token] if head is None else made.gone[:, head : head + 1, token]
    return int(((left >= 0) & (left <= step)).sum())


COLORED = "return [...document.querySelectorAll('#text span')].map((one) => getComputedStyle(one).backgroundColor)"
CLEAR = "rgba(0, 0, 0, 0)"


def test_the_slider_goes_back_and_forth(reader: Browser, page: Path, made: tracing.Trace) -> None:
    reader.open(page)
    last = len(made.seen) - 1
    assert reader.text("#where") == f"{last} of {last}: {made.seen[-1]} tokens read"
    for keys, step in ((["left", "left"], last - 2), (["home"], 0), (["right"], 1), (["end"], last)):
        reader.type("#step", *keys)
        assert reader.text("#where") == f"{step} of {last}: {made.seen[step]} tokens read"
        colors = reader.run(COLORED)
        assert [color != CLEAR for color in colors] == [
            token < made.seen[step] and gone(made, token, step) < HEADS for token in range(len(made.ids))
        ]
        future = reader.run("return document.querySelectorAll('#text span.future').length")
        assert future == len(made.ids) - made.seen[step]
    assert "<b>" in reader.text("p") and reader.complaints() == []


def test_a_token_tells_its_score_and_columns_at_the_step(reader: Browser, page: Path, made: tracing.Trace) -> None:
    reader.open(page)
    token, places = 3, made.places()
    reader.point_at(f"#text span:nth-child({token + 1})")
    fed = made.seen[-1]
    read_at = int(made.read_at()[token])
    for step in range(len(made.seen)):
        reader.type("#step", "home", *["right"] * step)
        words = reader.text("#details")
        assert words.startswith(f"token {token} ") and f"cached in {4 - gone(made, token, step)} of 4 heads" in words
        for layer in range(2):
            for head in range(2):
                cell = reader.text(f"#details tr:nth-child({layer + 2}) td:nth-child({head + 2})").split("\n")
                left = int(made.gone[layer, head, token])
                end = left if left >= 0 else len(made.seen) - 1
                assert cell[0] == (f"left with {left}" if 0 <= left <= step else "cached")
                at = int(places[(layer * 2 + head) * fed + token]) + min(step, end) - read_at
                shown = dict(zip(made.values, cell[1:], strict=True))
                assert shown.pop("protected") == ("yes" if made.values["protected"][at] else "no")
                for name, number in shown.items():
                    assert float(number) == pytest.approx(float(made.values[name][at]), rel=1e-3), name


def test_a_strip_chooses_its_head(reader: Browser, page: Path, made: tracing.Trace) -> None:
    reader.open(page)
    strip = "#overview tr:nth-child(2) td:nth-child(3)"
    seen = made.seen[-1]
    held = int((made.gone[0, 1, :seen] < 0).sum())
    assert (
        reader.run(f"return document.querySelector('{strip}').title")
        == f"layer 0, KV head 1: {held} of {seen} tokens cached"
    )
    for layer, head in (("0", "1"), ("all", "all")):
        reader.run(f"document.querySelector('{strip}').click()")
        assert reader.run("return ['layer', 'head'].map((id) => document.getElementById(id).value)") == [layer, head]
    assert reader.complaints() == []


def test_one_head_and_other_colours(reader: Browser, page: Path, made: tracing.Trace) -> None:
    reader.open(page)
    reader.type("#head", "1")
    reader.type("#step", "left")
    step = len(made.seen) - 2
    shown = [color != CLEAR for color in reader.run(COLORED)]
    assert shown == [token < made.seen[step] and gone(made, token, step, head=1) < 2 for token in range(len(made.ids))]
    reader.run("const list = document.getElementById('color'); list.value = 'left'; list.dispatchEvent(new Event('input'))")
    shown = [color != CLEAR for color in reader.run(COLORED)]
    assert shown == [token < made.seen[step] and gone(made, token, step, head=1) > 0 for token in range(len(made.ids))]
    reader.type("#color", "score")
    assert "low score" in reader.text(".legend")
    shown = [color != CLEAR for color in reader.run(COLORED)]
    assert shown == [token < made.seen[step] and gone(made, token, step, head=1) < 2 for token in range(len(made.ids))]
    reader.type("#step", "home")
    reader.type("#play", " ")
    last = len(made.seen) - 1
    assert reader.run(
        "return new Promise((done) => { const wait = setInterval(() => {"
        f" if (document.getElementById('step').value === '{last}') {{ clearInterval(wait); done(true); }} }}, 50); }})"
    )
    assert reader.text("#where").startswith(f"{last} of {last}")
