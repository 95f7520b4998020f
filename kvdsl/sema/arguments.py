"""Matching the arguments of a call with what a function takes."""

from __future__ import annotations

from kvdsl import codes
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.ir.ops import PLAIN_REDUCTIONS
from kvdsl.sema.needs import Report
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn

_SHOWN = 8
"""How many names a message lists."""


def match_arguments(node: syn.Call, parameters: tuple[syn.Parameter, ...], report: Report) -> dict[str, syn.Expr] | None:
    """What a call gives by parameter, those left out with a default not among them; None after a report."""
    function = node.function.text
    names = {parameter.name.text: parameter.default is None for parameter in parameters}
    places = list(names)
    positional = sum(argument.keyword is None for argument in node.arguments)
    values: dict[str, syn.Expr] = {}
    for index, argument in enumerate(node.arguments):
        keyword = argument.keyword
        if argument.ranges is not None:
            over_without_reduction(function, argument.ranges, report)
        elif keyword is None and index >= positional:
            message = "an argument without a name cannot follow one with a name"
            report(codes.ARGUMENTS, argument.span, message, f"write `{_signature(function, parameters)}`")
        elif keyword is None and index >= len(places):
            needed = sum(names.values())
            counts = str(needed) if needed == len(places) else f"{needed} to {len(places)}"
            report(codes.ARGUMENTS, node.span, takes(function, counts, len(node.arguments)))
        elif keyword is not None and keyword.text not in names:
            no_argument(function, keyword, places, report)
        elif keyword is not None and keyword.text in values:
            report(codes.ARGUMENTS, keyword.span, f"the argument `{keyword.text}` is given twice")
        else:
            values[places[index] if keyword is None else keyword.text] = argument.value
            continue
        return None
    missing = [name for name, needed in names.items() if needed and name not in values]
    if missing:
        message = f"`{function}` needs its argument{'' if len(missing) == 1 else 's'} {listed(missing[:_SHOWN], 'and')}"
        report(codes.ARGUMENTS, node.span, message, f"write `{_signature(function, parameters)}`")
        return None
    return values


def takes(function: str, counts: str, count: int) -> str:
    """How many arguments a function takes, and how many there are."""
    wants = f"{counts} argument{'' if counts == '1' else 's'}"
    return f"`{function}` takes {wants}, but {count} {'is' if count == 1 else 'are'} given"


def no_argument(function: str, keyword: syn.Word, names: list[str] | tuple[()], report: Report) -> None:
    """Reports an argument by a name that the function does not know."""
    help = did_you_mean(keyword.text, names)
    if help is None and names:
        help = f"its argument{' is' if len(names) == 1 else 's are'} {listed(names[:_SHOWN], 'and')}"
    report(codes.ARGUMENTS, keyword.span, f"`{function}` has no argument named `{keyword.text}`", help)


def over_without_reduction(function: str, ranges: Span, report: Report) -> None:
    """Reports an `over`, `where` or `by` in a call that reduces nothing."""
    word = ranges.text.split()[0]
    message = f"`{function}` is not a reduction of one value, so `{word}` has no meaning here"
    report(codes.ARGUMENTS, ranges, message, f"the reductions are {listed(PLAIN_REDUCTIONS, 'and')}")


def _signature(function: str, parameters: tuple[syn.Parameter, ...]) -> str:
    return f"{function}({', '.join(parameter.span.quoted(20) for parameter in parameters[:_SHOWN])})"
