"""Policies in notebooks: `%load_ext kvdsl`, and then `%%kv` above a policy.

Imported when the extension is loaded, so that kvdsl needs no IPython otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from kvdsl.compiler import compile_text
from kvdsl.diagnostics import Diagnostic, DiagnosticError, render_human, summary
from kvdsl.errors import KvdslError
from kvdsl.explain.facts import facts
from kvdsl.explain.words import rows
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_expression
from kvdsl.loading import cache_class
from kvdsl.shipped import policy_name

_STYLES = {
    "1;31": "color:var(--jp-error-color1,var(--vscode-errorForeground,#d1453b));font-weight:bold",
    "1;33": "color:var(--jp-warn-color1,var(--vscode-editorWarning-foreground,#b08000));font-weight:bold",
    "34": "color:var(--jp-info-color1,#3d7fd9)",
    "36": "color:var(--jp-success-color1,#2a8a60)",
    "1": "font-weight:bold",
}
"""A terminal's colours as a notebook's: its theme's own, or else such as can be read on white and on black."""


def register(shell: Any) -> None:
    """Give an IPython shell the cell magic `%%kv`."""
    shell.register_magic_function(lambda line, cell: run_cell(shell.user_ns, line, cell), "cell", "kv")


def run_cell(names: dict[str, Any], line: str, cell: str) -> None:
    """Compile a cell's policy, and give its cache class the policy's name.

    Args:
        names: the user's namespace; where there is no class, the name is taken out of it, lest an earlier one be used.
        line: defaults of params to change, `budget=128 sinks=8`.
        cell: the text of a .kv file; what it imports is looked for in the current folder.

    Raises:
        UsageError: if there is no class. What is wrong has been shown; IPython ends the cell with this line and no traceback.
    """
    names.pop(policy_name(cell) or "", None)
    try:
        compiled = compile_text(cell, _settings(line))
        made = cache_class(compiled)
    except DiagnosticError as error:
        display(Findings(error.diagnostics))
        raise UsageError(f"not compiled: {summary(error.diagnostics)}") from None
    except KvdslError as error:
        raise UsageError(str(error)) from None
    names[compiled.policy.name] = made
    if compiled.diagnostics:
        display(Findings(compiled.diagnostics))
    display(Ready(compiled.policy))


def _settings(line: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in line.split()]
    if not all(name and value for name, _, value in pairs):
        raise KvdslError(f"after `%%kv` stand params and their values, as in `%%kv budget=128`, not `{line}`")
    return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class Findings:
    """Diagnostics in a notebook: what a terminal shows, in the notebook's colours."""

    diagnostics: tuple[Diagnostic, ...]

    def __repr__(self) -> str:
        return render_human(self.diagnostics)

    def _repr_html_(self) -> str:
        text = escape(render_human(self.diagnostics, color=True), quote=False)
        marked = re.sub("\x1b\\[([0-9;]+)m", lambda code: _tag(code[1]), text)
        return f'<pre style="font-family:var(--jp-code-font-family,monospace)">{marked}</pre>'  # JupyterLab has another one for outputs


def _tag(code: str) -> str:
    """What a terminal's code is in HTML."""
    return "</span>" if code == "0" else f'<span style="{_STYLES[code]}">'


@dataclass(frozen=True)
class Ready:
    """A policy that was compiled: how its class is called, and what it does and costs in a few lines."""

    policy: Policy

    @property
    def call(self) -> str:
        """How a cache is made, with the params' defaults."""
        params = (f"{param.name}={print_expression(param.default)}" for param in self.policy.params)
        return f"{self.policy.name}({', '.join(('model', *params))})"

    @property
    def lines(self) -> dict[str, list[str]]:
        """Of what `kvdsl explain` says, what matters first."""
        said = rows(facts(self.policy))
        return {title: said[title] for title in ("keeps", "selects", "costs") if title in said}

    def __repr__(self) -> str:
        told = (f"  {title:<8} {text}" for title, texts in self.lines.items() for text in texts)
        return "\n".join((self.call, *told))

    def _repr_html_(self) -> str:
        told = (
            f'<tr><th scope="row" style="text-align:left">{escape(title)}</th>'
            f'<td style="text-align:left">{"<br>".join(map(escape, texts))}</td></tr>'
            for title, texts in self.lines.items()
        )
        return f"<code>{escape(self.call)}</code><table>{''.join(told)}</table>"
