"""A result as tables: Markdown for people and forges, LaTeX (booktabs) for papers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvdsl_lab.eval.usage import notes, without_usage
from kvdsl_lab.reproduce.experiment import Experiment, Paper, Row

_VERDICTS = {True: "holds", False: "does not hold", None: "open"}


def pivot(rows: Iterable[Row], index: Sequence[str], across: str, value: str, label: str = "{}") -> list[Row]:
    """One row for every combination of `index`, with a column for every value of `across`.

    Args:
        label: how a column is called, for example `D = {}`.
    """
    found: dict[tuple[Any, ...], Row] = {}
    columns: dict[str, None] = {}
    for row in rows:
        key = tuple(row[name] for name in index)
        column = label.format(row[across])
        columns[column] = None
        found.setdefault(key, dict(zip(index, key, strict=True)))[column] = row[value]
    return [{**row, **{column: row.get(column) for column in columns}} for row in found.values()]


def shown(value: Any) -> str:
    """A value in a table: four significant digits, and a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _numeric(rows: Sequence[Row], column: str) -> bool:
    return all(isinstance(row.get(column), (int, float, type(None))) for row in rows)


def _made_with(result: Mapping[str, Any]) -> str:
    """Model, machine and versions, in one sentence; machine and versions are those of experiments that do not name their own."""
    setup, machine = result["setup"], result["environment"]
    sizes = "toy sizes (`--quick`)" if setup["quick"] else "full sizes"
    read = (
        f"{setup['model']} in {machine['dtype'] or 'its own dtype'}, {setup['text']}"
        if "model" in setup
        else "random weights"
    )
    return "; ".join((
        read,
        f"{sizes}, seed {setup['seed']}, {setup['repeats']} repeats of every time, backend {setup['backend']}",
        _machine(machine),
        f"{result['seconds']:.0f} s",
    ))  # fmt: skip


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in ("kvdsl", "torch", "transformers"))
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{where}; {versions}"


def _measured(paper: Paper, result: Mapping[str, Any]) -> Iterator[tuple[Experiment, Mapping[str, Any]]]:
    """The experiments of which there are rows."""
    for experiment, part in zip(paper.experiments, result["experiments"], strict=True):
        if part["rows"]:
            yield experiment, part


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(paper: Paper, result: Mapping[str, Any]) -> str:
    """The whole result."""
    parts = [f"# {paper.title}", f"`kvdsl reproduce {paper.name}`: {_made_with(result)}."]
    for experiment, part in _measured(paper, result):
        parts.append(f"## {part['source']}: {part['title']}")
        if part["says"]:
            parts.append(f"The paper: {part['says']}")
        if "environment" in part:
            parts.append(f"Measured on {_machine(part['environment'])}.")
        parts.append(_markdown_table(experiment.table([without_usage(row) for row in part["rows"]])))
        parts += _notes(part["rows"])
        if part["findings"]:
            parts.append("\n".join(
                f"- {_VERDICTS[one['holds']]}: {one['claim']} ({one['measured']})" for one in part["findings"]
            ))  # fmt: skip
        parts += [f"![{part['title']}]({name})" for name in part["figures"] if name.endswith(".png")]
    return "\n\n".join(parts) + "\n"


def _notes(rows: Sequence[Row]) -> list[str]:
    """A paragraph that says in which rows a policy did nothing; none if it always did."""
    told: dict[str, list[str]] = {}
    for row, note in notes(rows):
        words = [shown(value) for value in row.values() if isinstance(value, str)]
        words = words or [f"{name} {shown(value)}" for name, value in [*row.items()][:1]]
        told.setdefault(note, []).append(", ".join(words))
    return [f"{note[0].upper()}{note[1:]}: {'; '.join(dict.fromkeys(who))}." for note, who in told.items()]


def _markdown_table(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    rule = ("---:" if _numeric(rows, name) else "---" for name in columns)
    lines = [[_piped(name.replace("_", " ")) for name in columns], list(rule)]
    lines += [[_piped(shown(row.get(name))) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _piped(text: str) -> str:
    return text.replace("|", r"\|")


# -- LaTeX -------------------------------------------------------------------------------------------------------------


def latex(paper: Paper, result: Mapping[str, Any]) -> str:
    """A table environment for every experiment; needs `\\usepackage{booktabs}`."""
    parts = [f"% {paper.title}", f"% {_made_with(result)}", "% needs \\usepackage{booktabs}"]
    for experiment, part in _measured(paper, result):
        parts += ["", *_latex_table(paper.name, part, experiment.table([without_usage(row) for row in part["rows"]]))]
        parts += [f"% measured on {_machine(part['environment'])}"] if "environment" in part else []
        parts += [f"% {note}" for note in _notes(part["rows"])]
    return "\n".join(parts) + "\n"


def _latex_table(paper: str, part: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    columns = _columns(rows)
    yield r"\begin{table}[ht]"
    yield r"  \centering"
    yield f"  \\caption{{{_tex(part['title'])} ({_tex(part['source'])})}}"
    yield f"  \\label{{tab:{paper}-{part['name']}}}"
    yield f"  \\begin{{tabular}}{{{''.join('r' if _numeric(rows, name) else 'l' for name in columns)}}}"
    yield r"    \toprule"
    yield f"    {' & '.join(_tex(name.replace('_', ' ')) for name in columns)} \\\\"
    yield r"    \midrule"
    for row in rows:
        yield f"    {' & '.join(_tex(shown(row.get(name))) for name in columns)} \\\\"
    yield r"    \bottomrule"
    yield r"  \end{tabular}"
    yield r"\end{table}"


_TEX = str.maketrans({
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "–": "--", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$",
})  # fmt: skip


def _tex(text: str) -> str:
    return text.translate(_TEX)
