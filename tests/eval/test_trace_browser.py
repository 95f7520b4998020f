"""The page of `kvdsl trace` in a real browser: what a reader sees when he moves the slider and points at tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvdsl
from kvdsl.generation.models import encode
from kvdsl_lab.eval import trace as tracing
from tests.browser import CHROMIUM, DRIVER, Browser, browser
from tests.eval.conftest import model_of

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
        written = made.seen[step] >= made.prompt_tokens  # the newest token, which the next step reads
        assert future == len(made.ids) - made.seen[step] - written
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
                assert cell[0] == (f"left with step {left}" if 0 <= left <= step else "cached")
                at = int(places[(layer * 2 + head) * fed + token]) + min(step, end) - read_at
                shown = dict(zip(made.values, cell[1:], strict=True))
                assert shown.pop("protected") == ("yes" if made.values["protected"][at] else "no")
                for name, number in shown.items():
                    assert float(number) == pytest.approx(float(made.values[name][at]), rel=1e-3), name


@pytest.fixture
def tall(tokenizer: Any, tmp_path: Path) -> Path:
    """The page of a model with SmolLM2's thirty layers, which read its prompt at once."""
    prompt = encode(tokenizer, "Once upon a time, in a house by the sea, there lived an old captain. " * 30)
    lm = model_of(tokenizer, layers=30, positions=1024)
    cache: Any = kvdsl.load("roco")(lm, budget=BUDGET, backend="torch")
    made = tracing.trace(lm, prompt, NEW, cache)
    facts = {"policy": "RoCo", "expression": "mean(attn)", "settings": "", "model": "m", "environment": {"kvdsl": "0"}}
    path = tmp_path / "tall.html"
    path.write_text(tracing.page({**facts, **tracing.as_data(made, tokenizer)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_layers_are_in_view_and_the_table_covers_nothing(reader: Browser, tall: Path, width: int) -> None:
    with reader.sized(width, 900):
        reader.open(tall)
        assert reader.run("return document.documentElement.scrollWidth") <= width
        strips = reader.run("return document.querySelector('#overview').getBoundingClientRect().bottom")
        table = "return document.getElementById('details').getBoundingClientRect().top"
        assert width < 1280 or strips <= reader.run(table)
        reader.point_at("#text span:nth-child(200)")
        assert "left with the prompt" in reader.text("#details")
        at = "return document.querySelector('#text span:nth-child(200)').getBoundingClientRect().bottom"
        assert (
            reader.run(at)
            <= reader.run(table)
            == reader.run("return document.querySelector('main').getBoundingClientRect().bottom")
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read(reader: Browser, tall: Path, scheme: str) -> None:
    """Of ordinary text WCAG 2.2 asks for a contrast of 4.5 to 1; what has left, is to come or is painted is text."""
    with reader.colours(scheme):
        reader.open(tall)
        for step in ("end", "home"):
            reader.type("#step", step)
            for colour in ("kept", "left", "score"):
                reader.run(
                    f"const list = document.getElementById('color'); list.value = '{colour}';"
                    "list.dispatchEvent(new Event('input'))"
                )
                assert reader.contrast("#text span, p, .legend span, #where, #details, th") >= 4.5, (step, colour)


def test_the_newest_token_is_not_pale(reader: Browser, tall: Path) -> None:
    reader.open(tall)
    for step in ("end", "home"):
        reader.type("#step", step)
        pale = "[...document.querySelectorAll('#text .future')].map((one) => Number(one.dataset.token))"
        first_new = "document.querySelector('#text .new').dataset.token"
        assert reader.run(f"return {pale}.includes(Number({first_new}))") is False


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
