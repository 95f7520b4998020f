"""What the gallery promises: every policy of it is a policy like the shipped ones, says where it comes from, and was checked so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvdsl
from kvdsl.compiler import analyse, find_policy
from kvdsl.provenance import provenance
from kvdsl.shipped import all_policies, found_policies, gallery_policies, shipped_policies, stems_by_name
from tests.cli.harness import run
from tests.gallery.formulas import IN_BLOCKS, METHODS, TOGETHER
from tests.gallery.layered import LAYERED
from tests.gallery.reusing import REUSING
from tests.integrations.presses import COUNTERPARTS, OTHERS

STEMS = [path.stem for path in gallery_policies()]
WARNED = {"triattention": ["KV0424"]}
"""What policies are warned of, and their docstrings say."""


def test_names_are_of_one_policy() -> None:
    stems = [path.stem for path in all_policies()]
    assert len(set(stems)) == len(stems) == len(stems_by_name())
    assert len(gallery_policies()) >= 40


@pytest.mark.parametrize("path", gallery_policies(), ids=lambda path: path.stem)
def test_is_clean_short_and_says_where_it_comes_from(path: Path) -> None:
    analysis = analyse(path)
    assert [one.code for one in analysis.diagnostics] == WARNED.get(path.stem, [])
    text = path.read_text(encoding="utf-8")
    assert 'import "' not in text
    statements = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    lines = [line for line in statements.split("{")[1].split("\n") if re.match(r"\s*\w", line)]
    assert len([line for line in lines if not line.lstrip().startswith("param ")]) <= 12, "a dozen besides its params"
    found = provenance(path.stem, analysis.policy.doc)
    assert found is not None
    summary = " ".join(analysis.policy.doc.split("\n\n")[0].split())
    assert summary.startswith("Approximately") != found.exact
    assert found.how is None or f"({found.how}): " in summary, "the first sentence says how it differs"
    assert analysis.policy.doc.split("\n\n")[0].endswith(".")


def test_was_checked_as_it_says() -> None:
    told: dict[str, set[str]] = {"language": set(), "formula": set(), "kvpress": set()}
    for path in gallery_policies():
        found = provenance(path.stem, analyse(path).policy.doc)
        assert found is not None and found.checks
        for check in found.checks:
            told[check].add(path.stem)
        assert found.presses or "kvpress" not in found.checks
    assert told["formula"] == METHODS.keys() | IN_BLOCKS.keys() | LAYERED.keys() | REUSING.keys() | {*TOGETHER}
    assert told["kvpress"] == COUNTERPARTS.keys() | set(OTHERS)


# -- by name, as the short list ----------------------------------------------------------------------------------------


def test_are_found_imported_and_compiled_by_name(tmp_path: Path) -> None:
    assert find_policy("keydiff").parent.name == "gallery"
    (tmp_path / "mine.kv").write_text('kv 1\nimport keydiff\npolicy Mine extends KeyDiff {\n  "Mine."\n  keep first 4\n}\n')
    assert not analyse(tmp_path / "mine.kv").diagnostics
    from kvdsl.policies import MorphKVCache

    assert kvdsl.load("morphkv") is MorphKVCache


def test_a_file_of_that_name_is_the_users_own(tmp_path: Path) -> None:
    """Only the short list could ever be imported like a file; what has the name of a gallery policy means nothing else."""
    (tmp_path / "keydiff.kv").write_text('kv 1\npolicy Own {\n  "Mine."\n  param budget = 4\n  score position\n}\n')
    (tmp_path / "mine.kv").write_text('kv 1\nimport "keydiff.kv"\npolicy Mine extends Own {\n  "Mine."\n}\n')
    assert not analyse(tmp_path / "mine.kv").diagnostics


def test_commands_know_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "policy KeyDiff" in run(capsys, "show", "keydiff").out
    told = run(capsys, "explain", "keydiff").out
    assert "year: 2025, arXiv 2504.15364" in told
    assert run(capsys, "test", "keydiff").out.splitlines()[-1] == "2 passed, 0 failed"


def test_list_shows_them_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    short = [path.stem for path in shipped_policies()]

    def named(text: str) -> list[str]:
        return [line.split()[0] for line in text.splitlines()[1:] if not line.startswith(" ")]

    assert named(run(capsys, "list").out) == short
    everything = run(capsys, "list", "--all").out
    assert named(everything) == short + STEMS + [path.stem for path in found_policies()]
    assert re.search(r"^keydiff +2025  .*  budget=512$", everything, re.MULTILINE)
    entries = {one["file"]: one for one in run(capsys, "list", "--all", "--json").json()["policies"]}
    keydiff, squeeze = entries["keydiff.kv"], entries["layer_budgets.kv"]
    assert keydiff["gallery"] and not keydiff["found"] and not entries["roco.kv"]["gallery"]
    assert all(entries[path.name]["found"] and not entries[path.name]["gallery"] for path in found_policies())
    assert (keydiff["year"], keydiff["arxiv"], keydiff["exact"]) == (2025, "2504.15364", True)
    assert (keydiff["kvpress"], keydiff["checked"]) == (["KeyDiffPress"], ["formula", "kvpress"])
    assert keydiff["paper"].startswith("Park et al.")
    how = "the layers' shares are found on a text beforehand, not for each prompt"
    assert (squeeze["exact"], squeeze["how"]) == (False, how)
