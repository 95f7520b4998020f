"""docs/diagnostics.md: every code of `kvdsl check`."""

from __future__ import annotations

from kvdsl.codes import CODES, GONE, Code
from scripts.pages.language import gone
from scripts.pages.markdown import MADE
from scripts.prose import wrapped

CHAPTERS = {
    "KV01": "Reading and syntax",
    "KV02": "Names, imports, inheritance",
    "KV03": "Expressions and their axes",
    "KV04": "Policies as a whole",
    "KV06": "Tests",
}


def diagnostics_page() -> str:
    """Every code with its explanation and an example that fails with it."""
    parts = [
        MADE + "# Diagnostics\n",
        "Every message of `kvdsl check` has a code, which keeps its meaning for ever. `kvdsl explain CODE` shows the same as this page.",
        "Each example is a whole file that fails with its code.\n",
    ]
    chapter = ""
    for code in sorted(CODES.values(), key=lambda one: one.id):
        if code.id[:4] != chapter:
            chapter = code.id[:4]
            parts.append(f"## {CHAPTERS[chapter]}\n")
        parts.append(_diagnostic(code))
    return wrapped("\n".join(parts))


def _diagnostic(code: Code) -> str:
    kind = "" if code.severity == "error" else f" ({code.severity})"
    text = f"### {code.id}: {code.title}{kind} {{ #{code.id.lower()} }}\n\n{code.explanation}\n"
    if code is GONE:
        text += f"\n{gone()}"
    if not code.example or len(code.example) > 2_000:
        return text
    options = "".join(f" --set {name}={value}" for name, value in code.settings)
    with_options = f"\nWith `kvdsl check{options}`:\n" if options else ""
    return f"{text}{with_options}\n```text\n{_visible(code.example)}```\n"


def _visible(example: str) -> str:
    """What cannot be printed is shown as an escape."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in example)
