"""Values of params given from outside: `--set NAME=VALUE`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvdsl import codes
from kvdsl.budget import RATE, as_written, offers_ratio
from kvdsl.diagnostics import Sink, nearest
from kvdsl.source import SourceFile, Span

_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")


@dataclass(frozen=True)
class Setting:
    """A param's value, int or float as written. The span is in a text of its own, so that messages can quote it."""

    value: float
    span: Span


def read_settings(given: Mapping[str, str], params: list[str], sink: Sink) -> dict[str, Setting]:
    """Return the settings of a policy's params; report unknown and invalid ones.

    Without a param of that name, `ratio` sets the budget as a ratio of the prompt, 1 as well as 1.0.
    """
    settings = {}
    known = [*params, "ratio"] if offers_ratio(params) else params
    for name, text in given.items():
        source = SourceFile("--set", f"{name}={text}")
        name_span, value_span = source.span(0, len(name)), source.span(len(name) + 1, len(source.text))
        if name not in known:
            near = nearest(name, known)
            help = None if near is None else f"did you mean `{near}`?"
            if name == "ratio":
                help = "it has no `budget` that a `ratio` could set"
            elif help is None and params:
                help = f"the params are {', '.join(f'`{param}`' for param in params)}"
            sink.report(codes.UNKNOWN_SETTING, name_span, f"the policy has no param `{name}`", help)
            continue
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            message = f"`{name}` needs a number, not `{text[:40]}`"
            sink.report(codes.BAD_SETTING, value_span, message, f"for example `--set {name}=256`")
            continue
        if name == "ratio" and name not in params:
            if "budget" in given:
                sink.report(
                    codes.BAD_SETTING,
                    source.span(0, len(source.text)),
                    "`budget` and `ratio` are both given",
                    "give one of them",
                )
            elif 0 < value <= 1:
                settings["budget"] = Setting(value, value_span)
            else:
                sink.report(codes.BAD_SETTING, value_span, f"`ratio` is {value:g}, which is not a ratio of the prompt", RATE)
            continue
        settings[name] = Setting(as_written(value, text), value_span)
    return settings
