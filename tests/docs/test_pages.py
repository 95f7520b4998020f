"""Whatever a document shows works: its policies check, its programs and commands run and print what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import kvdsl
from kvdsl.cli.group import LazyGroup
from kvdsl.compiler import analyse
from kvdsl.models import here
from kvdsl.models.catalogue import named
from kvdsl.shipped import all_policies
from kvdsl_lab.assets import load_reference_model, reference_model_path
from tests.docs.pages import Printed, blocks, documents, forget_packages, play, read, whole
from tests.quick import few

LANGUAGES = {"kv", "python", "console", "shell", "text", "mermaid", "yaml", "lua", "toml", "lisp"}
RUN = [page for page in documents() if any(block.language in ("python", "console") for block in blocks(read(page)))]

needs_model = pytest.mark.skipif(
    not (reference_model_path() / "model.safetensors").exists(), reason="needs the reference model"
)


def test_no_page_saves_a_policy_under_a_shipped_name() -> None:
    """In a clone its package would take the place of the shipped one's."""
    shipped = {path.name for path in all_policies()}
    assert not [(page, block.title) for page in documents() for block in blocks(read(page)) if block.title in shipped]


def test_there_is_one_way_to_install() -> None:
    """The README and the site's front page say the same."""
    told = [read(page).partition("## Install\n")[2].partition("\n## ")[0] for page in ("README.md", "docs/index.md")]
    assert told[0] == told[1] != ""
    assert [block.text for block in blocks(told[0])] == [
        "pip install . ./lab\nkvdsl doctor         # what works on this machine\n"
    ]


def test_the_readme_lists_its_sections() -> None:
    text = read("README.md")
    contents = text.partition("![")[0]
    for head in re.findall(r"^## (.+)$", text, re.M):
        anchor = re.sub(r"[^a-z -]", "", head.lower()).replace(" ", "-")
        assert f"[{head}](#{anchor})" in contents.replace("\n", " "), head


READERS = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in (
    "index", "tour", "tutorial", "seven_words", "language", "choosing", "support", "performance", "api", "design", "extending", "style"
))]  # fmt: skip
"""What people read to use kvdsl and to change it, beside the how-tos; all other pages are records."""


def test_pages_stay_short() -> None:
    howtos = [page for page in documents() if page.startswith("docs/howto/")]
    lines = {page: read(page).count("\n") for page in documents()}
    assert len(howtos) <= 15
    assert sum(lines[page] for page in READERS + howtos) <= 5_000
    assert lines["README.md"] <= 180 and lines["docs/performance/gpus.md"] <= 150 and lines["docs/style.md"] <= 60


@pytest.mark.parametrize("document", documents())
def test_policies_check(document: str, tmp_path: Path) -> None:
    """No errors, and no warnings, but that a page may show names alone which nothing uses."""
    for number, block in enumerate(blocks(read(document))):
        assert block.language in LANGUAGES, f"```{block.language}"
        if block.language == "kv":
            file = tmp_path / (block.title or f"block_{number}.kv")
            file.write_text(whole(block), encoding="utf-8")
            found = [one for one in analyse(file).diagnostics if one.code != "KV0212" or "policy" in block.text]
            assert found == [], block.text


def stand_in(name: str) -> tuple[Any, Any]:
    """The reference model, with a chat template, where SmolLM2 is not on this machine."""
    assert name == "smollm2"
    model, tokenizer = load_reference_model()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}\n"
    return model, tokenizer


@needs_model
@pytest.mark.parametrize("document", few(RUN, "README.md"))
def test_programs_and_commands(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # what other tests have compiled, with another number of threads
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("COLUMNS", raising=False)
    forget_packages()
    if not here(named("smollm2")):
        monkeypatch.setattr(kvdsl, "load_model", stand_in, raising=False)
    try:
        for printed in play(read(document)):
            if "smollm2" in printed.what and not here(named("smollm2")):
                continue  # what another model says is another text
            assert printed.agree, f"{printed.what}\n--- shown\n{printed.shown}\n--- real\n{printed.real}"
    finally:
        forget_packages()


@pytest.mark.parametrize("document", documents())
def test_commands_that_are_not_run_are_well_formed(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(read(document)):
        lines = block.text.replace("\\\n", "").splitlines() if block.language == "shell" else []
        for line in lines:
            if line.startswith("kvdsl "):
                for text in re.findall(r"\S+\.(?:txt|jsonl?)\b", line):
                    Path(text).touch()  # the reader's own
                for folder in re.findall(r"--data (?!\S+\.jsonl)(\S+)", line):
                    Path(folder).mkdir(parents=True, exist_ok=True)
                understood(line.partition("#")[0].split()[1:])


def understood(arguments: list[str]) -> None:
    """Have click read the arguments, of a command or of a command's command; it raises UsageError where it cannot."""
    found: click.Command = LazyGroup("kvdsl")
    context = click.Context(found)
    while isinstance(found, click.Group):
        _, found, arguments = found.resolve_command(context, arguments)  # type: ignore[assignment]
    found.make_context(found.name, arguments)


def test_what_is_shown_is_compared() -> None:
    """A page whose output is not what it prints is noticed, an ellipsis is understood."""
    page = "```python\nprint(1)\nprint(2)\n```\n```text\n{}\n```\n"
    verdicts = {shown: [printed.agree for printed in play(page.format(shown))] for shown in ("1\n2", "1\n...", "1", "2\n1")}
    assert verdicts == {"1\n2": [True], "1\n...": [True], "1": [False], "2\n1": [False]}
    assert not Printed("", "a.c", "abc", 0, 0).agree
