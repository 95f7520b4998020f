"""Match the arguments of a call with a function's parameters."""

from __future__ import annotations

from kvdsl import codes
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.helps import Fix, Help, offer
from kvdsl.ir.ops import ELEMENTWISE, PLAIN_REDUCTIONS, POOLS, PRELUDE, REDUCTIONS, ReductionRow
from kvdsl.sema.needs import Report
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn

_SHOWN = 8
"""The most names that a message lists."""


def match_arguments(node: syn.Call, parameters: tuple[syn.Parameter, ...], report: Report) -> dict[str, syn.Expr] | None:
    """Map parameter names to the arguments given for them; defaults are not filled in. None after a report."""
    function = node.function.text
    names = {parameter.name.text: parameter.default is None for parameter in parameters}
    places = list(names)
    positional = sum(argument.keyword is None for argument in node.arguments)
    values: dict[str, syn.Expr] = {}
    for index, argument in enumerate(node.arguments):
        keyword = argument.keyword
        if keyword is None and index >= positional:
            message = "an argument without a name cannot follow one with a name"
            report(codes.ARGUMENTS, argument.span, message, f"its form is `{_signature(function, parameters)}`")
        elif keyword is None and index >= len(places):
            needed = sum(names.values())
            counts = str(needed) if needed == len(places) else f"{needed} to {len(places)}"
            fewer = [one.span.quoted() for one in node.arguments[: len(places)]]
            help = offer(f"write `{function}({', '.join(fewer)})`")
            report(codes.ARGUMENTS, node.span, takes(function, counts, len(node.arguments)), help)
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
        report(codes.ARGUMENTS, node.span, message, f"its form is `{_signature(function, parameters)}`")
        return None
    return values


def _example_of(row: ReductionRow) -> str:
    body = "attn" if "queries" in row.over else "attn over last 32 queries"
    return f"{row.name}({body}, 0.9)" if row.argument else f"{row.name}({body})"


EXAMPLES = {
    **{name: _example_of(row) for name, row in REDUCTIONS.items() if name not in PRELUDE},
    **{name: f"{name}(mean(attn))" for name, count in ELEMENTWISE.items() if count == 1 and name not in PRELUDE},
    "max": "max(mean(attn), 0.1)",
    "min": "min(mean(attn), 0.1)",
    "where": "where(age > 8, mean(attn), 1)",
    "project": "project(k, basis)",
    "turn": "turn(k, -position)",
    "ahead": "ahead(k, 512)",
    "pairs": "pairs(k)",
    "leverage": "leverage(k, 0.01)",
    "rank": "rank(sum(attn))",
    "enough": "enough(sum(attn), 0.95)",
    "fold": "fold(max(0.9 * prev, attn), 0)",
    "other": "other(k)",
    "max_pool": "max_pool(sum(attn), 7)",
    "mean_pool": "mean_pool(sum(attn), 7)",
    "count": "count()",
    "random": "random()",
}
"""An example call of each built-in function, for help texts."""


def example(function: str, more: str = "") -> str:
    """Return a help with an example call of a built-in function."""
    return offer(f"for example `{EXAMPLES[function]}`", more)


def how_to_call(node: syn.Call) -> str:
    """Return a help for a reduction or pool with wrong arguments, such as an axis as a number."""
    name = node.function.text
    if not node.arguments:
        return example(name)
    (first, *rest), texts = node.arguments, [argument.value.span.quoted() for argument in node.arguments]
    if name in POOLS:
        width = next(
            (argument.value.span.text for argument in node.arguments if isinstance(argument.value, syn.Constant)), "7"
        )
        value = next((one for one in texts if one != width), "sum(attn)")
        return offer(f"write `{name}({value}, {width})`")
    if REDUCTIONS[name].argument:
        return example(name)
    axes = [axis for argument in rest if (axis := _axis(argument)) is not None]
    if first.over is not None and axes:
        one, both = f"{name}({first.span.quoted()})", f"{name}({name}({first.span.quoted()}) over {axes[0]})"
        return offer(f"one axis at a time: `{one}` or `{both}`")
    if axes:
        return offer(f"write `{name}({texts[0]} over {axes[0]})`")
    if any(argument.keyword is not None and argument.keyword.text in _AXIS for argument in rest):
        return offer(
            f"axes have names: `{name}({texts[0]})` ", f"ranges over queries, `{name}({texts[0]} over slots)` over slots"
        )
    if len(rest) == 1 and isinstance(rest[0].value, syn.Constant) and 0 < rest[0].value.value < 1:
        return offer(f"a moving average is `ema({texts[0]}, {texts[1]})`")
    return offer(f"for example `{name}({texts[0]})`")


_AXIS = ("axis", "dim", "dims", "over", "axes")


def _axis(argument: syn.Argument) -> str | None:
    """Return the axis that an argument names, as in `queries` or `over=queries`."""
    if not isinstance(argument.value, syn.Name) or (argument.keyword is not None and argument.keyword.text not in _AXIS):
        return None
    word = argument.value.name
    return word if word in PLAIN_AXES else habits.AXES.get(word)


PLAIN_AXES = ("queries", "slots", "dims", "heads")


def takes(function: str, counts: str, count: int) -> str:
    """Return a message with the number of arguments expected and given."""
    wants = f"{counts} argument{'' if counts == '1' else 's'}"
    return f"`{function}` takes {wants}, but {count} {'is' if count == 1 else 'are'} given"


def no_argument(function: str, keyword: syn.Word, names: list[str] | tuple[()], report: Report) -> None:
    """Report an argument with an unknown name."""
    help = did_you_mean(keyword.text, names)
    if help is None and names:
        help = f"its argument{' is' if len(names) == 1 else 's are'} {listed(names[:_SHOWN], 'and')}"
    report(codes.ARGUMENTS, keyword.span, f"`{function}` has no argument named `{keyword.text}`", help)


def over_without_reduction(function: str, ranges: Span, report: Report) -> None:
    """Report an `over`, `where` or `by` in a call that is not a reduction."""
    word = ranges.text.split()[0]
    message = f"`{function}` is not a reduction of one value, so `{word}` has no meaning here"
    report(codes.ARGUMENTS, ranges, message, without_ranges(ranges, f"the reductions are {listed(PLAIN_REDUCTIONS, 'and')}"))


def without_ranges(ranges: Span, text: str = "leave it out") -> Help:
    """Return a help whose edit removes an `over`, `where` or `by`."""
    place, title = ranges.file.span(ranges.start - 1, ranges.end), f"leave out `{ranges.quoted()}`"
    return Help(text, lambda span: Fix(place, "", title))


def _signature(function: str, parameters: tuple[syn.Parameter, ...]) -> str:
    return f"{function}({', '.join(parameter.span.quoted(20) for parameter in parameters[:_SHOWN])})"
