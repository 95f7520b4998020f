"""A page for every policy that comes with kvdsl, for the site only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdsl.cli.list import paragraphs
from kvdsl.compiler import analyse
from kvdsl.explain.facts import facts
from kvdsl.explain.words import rows
from kvdsl.provenance import fields
from kvdsl.shipped import all_policies, found_policies, gallery_policies, shipped_policies
from scripts.pages.markdown import DOCS, MADE, ROOT, escaped, table


def policy_page(path: Path) -> str:
    """A shipped policy: what its docstring says, its file, what it costs, its tests, and the hand-written notes on it."""
    stem, policy = path.stem, analyse(path).policy
    source = fields(policy.doc)
    parts = [
        f"{MADE}# {policy.name}\n",
        *(f"{paragraph}\n" for paragraph in paragraphs(policy.doc)),
        *([table(("", "what its file says"), ((key, escaped(value)) for key, value in source.items()))] if source else []),
        f"## {path.relative_to(ROOT)}\n",
        f"```kv\n{path.read_text(encoding='utf-8')}```\n",
        "## What it does\n",
        table(
            ("", f"what `kvdsl explain {stem}` says"),
            ((title, "<br>".join(escaped(line) for line in lines)) for title, lines in rows(facts(policy)).items()),
        ),
    ]
    notes = DOCS / "notes" / f"{stem}.md"
    if notes.exists():
        parts.append(notes.read_text(encoding="utf-8"))
    test = path.with_name(f"{stem}_test.kv")
    if test.exists():
        parts += [
            "## Its tests\n",
            f"`kvdsl test {stem}` runs them.\n",
            f"```kv\n{test.read_text(encoding='utf-8')}```\n",
        ]
    return "\n".join(parts)


def policies_index(paths: Sequence[Path], title: str) -> str:
    """Policies of one folder, each with its year and its first sentence, which says where it is approximate."""
    lines = []
    for path in paths:
        policy = analyse(path).policy
        year = fields(policy.doc).get("year", "–").split(",")[0]
        lines.append((f"[{policy.name}]({path.stem}.md)", f"`{path.stem}`", year, escaped(paragraphs(policy.doc)[0])))
    return f"{MADE}# {title}\n\n{table(('policy', 'name', 'year', 'what it does'), iter(lines))}"


def policy_pages() -> dict[str, str]:
    """Path below docs/ -> text, of the pages that are made for the site."""
    return {
        "policies/index.md": policies_index(shipped_policies(), "Policies"),
        "policies/gallery/index.md": policies_index(gallery_policies(), "The gallery"),
        "policies/found/index.md": policies_index(found_policies(), "Found by search"),
        **{str(path.relative_to(ROOT).with_suffix(".md")): policy_page(path) for path in all_policies()},
    }
