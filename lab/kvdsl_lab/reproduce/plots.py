"""Drawing without a display: every figure as PNG and SVG. matplotlib is imported when something is drawn.

A paper draws with `lines` and `bars`, or by itself; whatever has a label comes into the figure's legend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdsl.errors import KvdslError
from kvdsl_lab.reproduce.experiment import Paper, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: Any = {"svg.hashsalt": "kvdsl", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
"""A fixed salt: the same rows make the same file."""

_SIZE = (6.8, 3.6)


def check_installed() -> None:
    """Raise KvdslError without matplotlib, before anything is measured."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise KvdslError("figures need matplotlib: pip install matplotlib, or give --no-plots")


def draw_all(paper: Paper, result: Mapping[str, Any], out: Path) -> None:
    """Every figure of a result, where the result says that it lies."""
    for experiment, part in zip(paper.experiments, result["experiments"], strict=True):
        if experiment.plot is not None and part["figures"]:
            draw(experiment.plot, part["rows"], [out / name for name in part["figures"]])


def draw(plot: Callable[[Figure, Sequence[Row]], None], rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """One figure, in as many formats as there are paths."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        plot(figure, rows)
        _legend(figure)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=150, metadata=about)


def _legend(figure: Figure) -> None:
    """One for all axes, beside them, where they show more than one thing."""
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]
    found = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    if len(found) > 1:
        figure.legend(found.values(), found.keys(), loc="outside right upper", fontsize="small", frameon=False)


def lines(axes: Axes, rows: Sequence[Row], *, x: str, y: str, by: str, log_x: bool = False) -> None:
    """One line with marks for every value of `by`; rows without an `x` run across as dashes, those without a `y` are left out."""
    for name, own in _groups(rows, by).items():
        points = sorted((row[x], row[y]) for row in own if row[x] is not None and row[y] is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=str(name))
        for row in (row for row in own if row[x] is None and row[y] is not None):
            axes.axhline(row[y], linestyle="--", linewidth=1, color="grey", label=str(name))
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({row[x] for row in rows if row[x] is not None})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))


def bars(axes: Axes, rows: Sequence[Row], *, x: str, y: str, by: str) -> None:
    """Groups of bars: one group for every value of `x`, in it one bar for every value of `by`; quartiles (`y`_q1, `y`_q3) as whiskers."""
    groups, labels = _groups(rows, by), list(dict.fromkeys(row[x] for row in rows))
    width = 0.8 / len(groups)
    for index, (name, own) in enumerate(groups.items()):
        there = [row for row in own if row[y] is not None]
        places = [labels.index(row[x]) + (index - (len(groups) - 1) / 2) * width for row in there]
        spread = [[row[y] - row[f"{y}_q1"] for row in there], [row[f"{y}_q3"] - row[y] for row in there]] if there and (
            f"{y}_q1" in there[0]
        ) else None  # fmt: skip
        axes.bar(places, [row[y] for row in there], width, yerr=spread, label=str(name), error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))


def _groups(rows: Sequence[Row], by: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[by], []).append(row)
    return found
