"""`kvdsl explain`: describe a policy, or the code of a diagnostic."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from kvdsl.cli import completion
from kvdsl.cli.common import params_as_data, print_json, set_option, terminal_width
from kvdsl.cli.options import memory_options
from kvdsl.errors import KvdslError
from kvdsl.explain import DTYPES

if TYPE_CHECKING:
    from kvdsl.explain.facts import Facts

_WIDTH = 100


@click.command()
@click.argument("what", metavar="POLICY|CODE", shell_complete=completion.policies_or_codes)
@set_option
@memory_options
@click.option(
    "--head-dim", type=click.IntRange(1), default=128, show_default=True, help="The model's head size, for the bytes."
)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="bfloat16", show_default=True,
              help="The model's dtype, for the bytes.")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["text", "json", "html"]), default="text", show_default=True,
              help="Text, JSON, or an HTML page.")  # fmt: skip
@click.option("--json", "style", flag_value="json", hidden=True)
def command(what: str, settings: dict[str, str], memory: dict[str, str], head_dim: int, dtype: str, style: str) -> None:
    """Describe a policy, or the code of a diagnostic.

    For a policy: what it keeps and evicts, what it attends to and when, its state per token with the reasons and costs, and its
    backends. For a code: its meaning, and a failing example.

    \b
    Examples:
      kvdsl explain roco
      kvdsl explain mine.kv --head-dim 64 --dtype float16
      kvdsl explain streaming_llm --storage blocks:32 --rope cached
      kvdsl explain roco --kv-dtype int4
      kvdsl explain KV0301
      kvdsl explain roco --format html > roco.html
    """
    if re.fullmatch(r"(?i)kv\d{4}", what):
        _explain_code(what.upper(), style)
        return
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.explain.facts import as_data, facts, laid_out

    source = find_policy(what)
    found = facts(
        laid_out(analyse(source, settings=settings).policy, **memory), head_dim, dtype, memory.get("kv_dtype", "model")
    )
    if style == "json":
        print_json(as_data(found) | {"params": params_as_data(found.policy)}, dtype=dtype)
    elif style == "html":
        from kvdsl.explain.html import policy_page
        from kvdsl.shipped import text_of

        click.echo(policy_page(found, text_of(source)), nl=False)
    else:
        from kvdsl.diagnostics import wants_color
        from kvdsl.shipped import text_of

        told = _in_words(found, text_of(source), terminal_width(_WIDTH))
        click.echo("\n".join(told), color=wants_color(sys.stdout))


def _in_words(found: Facts, text: str, width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters, with bold titles and some colour."""
    from kvdsl.diagnostics import printable
    from kvdsl.explain.words import rows
    from kvdsl.lower.without import eviction_by_torch, sentence
    from kvdsl.provenance import fields, prose

    policy = found.policy
    yield f"{click.style(policy.name, bold=True)} ({policy.stem}.kv)"
    for paragraph in re.split(r"\n\s*\n", prose(policy.doc)):
        yield ""
        yield from textwrap.wrap(printable(" ".join(paragraph.split())), width, initial_indent="  ", subsequent_indent="  ")
    source = fields(policy.doc)
    yield from [""] if source else []
    for key, value in source.items():
        told = printable(f"{key}: {value}")
        yield from textwrap.wrap(told, width, initial_indent="  ", subsequent_indent="    ")
    answers = {
        one["name"]: "yes" if one["ok"] else f"no: {sentence(one['name'], one['why_not'], text)}" for one in found.backends
    }
    answers |= {
        one["name"]: f"yes; {eviction_by_torch(one['torch_evicts'], text)}"
        for one in found.backends
        if "torch_evicts" in one
    }
    backends = [f"{name:<7} {answer}" for name, answer in answers.items()]
    for title, lines in {**rows(found), "backends": backends}.items():
        yield ""
        for index, line in enumerate(lines):
            indent = f"  {title if index == 0 else '':<10}"
            first, *rest = textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=" " * 12)
            yield click.style(first[:12], bold=True) + (_served(first[12:]) if title == "backends" else first[12:])
            yield from rest


def _served(line: str) -> str:
    """Print a backend's line, with its yes or no in colour."""
    name, answer, why = re.split(r"(?<= )(yes|no)\b", line, maxsplit=1)
    return name + click.style(answer, fg="green" if answer == "yes" else "yellow") + why


# -- codes -------------------------------------------------------------------------------------------------------------


def _explain_code(name: str, style: str) -> None:
    from kvdsl.codes import CODES
    from kvdsl.diagnostics import did_you_mean, wants_color

    code = CODES.get(name)
    if code is None:
        hint = did_you_mean(name, CODES)
        raise KvdslError(f"there is no code {name}" + (f": {hint}" if hint else ""))
    if style == "html":
        from kvdsl.explain.html import code_page

        click.echo(code_page(code), nl=False)
        return
    if style == "json":
        fields = {"code": code.id, "severity": code.severity, "title": code.title, "explanation": code.explanation}
        print_json(fields | {"example": code.example, "settings": dict(code.settings)})
        return
    head = click.style(f"{code.severity} {code.id}", fg="red" if code.severity == "error" else "yellow", bold=True)
    click.echo(f"{head}{click.style(f': {code.title}', bold=True)}", color=wants_color(sys.stdout))
    click.echo("\n" + textwrap.fill(code.explanation, terminal_width(_WIDTH)))
    if code.example and len(code.example) < 2_000:
        options = "".join(f" --set {key}={value}" for key, value in code.settings)
        verb = "refuses" if code.severity == "error" else "warns of"
        click.echo(f"\nFor example, `kvdsl check{options}` {verb} this:\n")
        click.echo(textwrap.indent(code.example, "    "), nl=False)
