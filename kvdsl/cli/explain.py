"""`kvdsl explain`: what a policy does, or what a diagnostic's code means, in words."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from kvdsl.cli.common import error, exit_code, finish, json_option, params_as_data, print_json, report, set_option
from kvdsl.ir.nodes import Expr, Input, Keep, Number, Param, Policy, Random
from kvdsl.ir.printer import print_expression
from kvdsl.ir.visitors import expressions, walk
from kvdsl.lower.plan import ColumnPlan, PackagePlan, make_plan

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = _POSITION = 4
_WIDTH = 100


@dataclass(frozen=True)
class Sizes:
    """Bytes of one slot: one token in one KV head of one layer."""

    key_and_value: int
    position: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.key_and_value + self.position + self.state


@click.command()
@click.argument("what", metavar="POLICY|CODE")
@set_option
@click.option(
    "--head-dim", type=click.IntRange(1), default=128, show_default=True, help="The model's head size, for the bytes."
)
@click.option("--dtype", type=click.Choice(sorted(_DTYPES)), default="bfloat16", show_default=True,
              help="The model's dtype, for the bytes.")  # fmt: skip
@json_option
def command(what: str, settings: dict[str, str], head_dim: int, dtype: str, as_json: bool) -> None:
    """Say in words what a policy does, or what an error code means.

    Of a policy: what it keeps, who leaves first, what it remembers of every token, what that costs, and where it runs.

    \b
    Examples:
      kvdsl explain roco
      kvdsl explain mine.kv --head-dim 64 --dtype float16
      kvdsl explain KV0301
    """
    if re.fullmatch(r"(?i)kv\d{4}", what):
        _explain_code(what.upper(), as_json)
        return
    policy = _policy(what, settings)
    plan = make_plan(policy)
    sizes = Sizes(2 * head_dim * _DTYPES[dtype], _POSITION, _FLOAT32 * len(plan.columns))
    if as_json:
        print_json(_as_data(policy, plan, sizes, head_dim), dtype=dtype)
    else:
        click.echo("\n".join(_in_words(policy, plan, sizes, head_dim, dtype)))


def _policy(name: str, settings: dict[str, str]) -> Policy:
    from kvdsl.compiler import analyse, find_policy

    analysis = analyse(find_policy(name), settings=settings)
    if not analysis.ok:
        report(analysis.diagnostics)
        finish(exit_code(analysis.diagnostics))
    return analysis.policy


# -- facts -------------------------------------------------------------------------------------------------------------

_NEEDS = {
    "attn": "attention probabilities",
    "logit": "attention scores before the softmax",
    "q": "query vectors",
    "k": "key vectors",
    "v": "value vectors",
}


def requires(policy: Policy) -> list[str]:
    """The tensors that the policy reads beside positions: some of attn, logit, q, k, v."""
    read = {node.name for expr in expressions(policy) for node in walk(expr) if isinstance(node, Input)}
    return [name for name in _NEEDS if name in read]


def backends(plan: PackagePlan) -> list[dict[str, Any]]:
    """Each backend: whether it serves the policy, and why not."""
    return [
        {"name": "cpu", "ok": plan.cpp is not None, "why_not": plan.cpp_refusal or None},
        {"name": "torch", "ok": True, "why_not": None},
        {"name": "triton", "ok": False, "why_not": "not in this version of kvdsl; on a GPU the torch backend serves"},
    ]


def _as_data(policy: Policy, plan: PackagePlan, sizes: Sizes, head_dim: int) -> dict[str, Any]:
    return {
        "name": policy.name,
        "doc": policy.doc,
        "params": params_as_data(policy),
        "budget": None if policy.budget is None else print_expression(policy.budget),
        "score": None if policy.score is None else print_expression(policy.score),
        "keeps": list(plan.keeps_text),
        "state": [
            {
                "name": column.name,
                "axes": ["slot"],
                "dtype": "float32",
                "bytes_per_slot": _FLOAT32,
                "meaning": _meaning(column),
            }
            for column in plan.columns
        ],
        "requires": requires(policy),
        "bytes_per_token": sizes.total,
        "bytes": {
            "key_and_value": sizes.key_and_value,
            "position": sizes.position,
            "state": sizes.state,
            "head_dim": head_dim,
        },
        "backends": backends(plan),
    }


# -- words -------------------------------------------------------------------------------------------------------------


def _in_words(policy: Policy, plan: PackagePlan, sizes: Sizes, head_dim: int, dtype: str) -> Iterator[str]:
    yield f"{policy.name} ({policy.stem}.kv)"
    for paragraph in re.split(r"\n\s*\n", policy.doc.strip()):
        yield ""
        yield from textwrap.wrap(" ".join(paragraph.split()), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    rows = {
        "keeps": [_keeps(policy)],
        "evicts": list(_evicts(policy)),
        "protects": [_protects(keep, policy) for keep in policy.keeps],
        "params": [_param(param) for param in policy.params],
        "tracks": [_tracks(column) for column in plan.columns] or ["nothing beside each token's position"],
        "costs": list(_costs(sizes, head_dim, dtype)),
        "reads": [_NEEDS[name] for name in requires(policy)]
        or ["positions only, so any attention implementation serves it"],
        "backends": [f"{one['name']:<7} {'yes' if one['ok'] else 'no: ' + one['why_not']}" for one in backends(plan)],
    }
    for title, lines in rows.items():
        if lines:
            yield ""
        for index, line in enumerate(lines):
            indent = f"  {title if index == 0 else '':<10}"
            yield from textwrap.wrap(line, _WIDTH, initial_indent=indent, subsequent_indent=" " * 12)


def _keeps(policy: Policy) -> str:
    if policy.budget is None:
        return "every token"
    return f"{_count(policy.budget, policy)} tokens per KV head, once it has made room"


def _count(expr: Expr, policy: Policy) -> str:
    """An expression; of a param with its default."""
    default = {param.name: param.default for param in policy.params}.get(getattr(expr, "name", ""))
    text = print_expression(expr)
    return text if default is None else f"{text} = {print_expression(default)}"


def _evicts(policy: Policy) -> Iterator[str]:
    if policy.budget is None or policy.score is None:
        yield "nothing, ever"
        return
    if any(isinstance(node, Random) for node in walk(policy.score)):
        yield f"by lot: the token with the lowest {print_expression(policy.score)} leaves first"
    else:
        yield f"the token with the lowest {print_expression(policy.score)} first; of equals, the older one"
    if policy.trigger != Number(value=1):
        yield f"only once it holds {print_expression(policy.trigger)} tokens more than the budget"
    if policy.max_drop != Number(value=0):
        yield f"at most {print_expression(policy.max_drop)} tokens at a time"
    if policy.slack != Number(value=0):
        yield f"down to {print_expression(policy.slack)} tokens above the budget"
    if policy.group != "mean":
        yield f"by the {policy.group} over the query heads that share a KV head"


def _protects(keep: Keep, policy: Policy) -> str:
    """`keep last recent` → `the last tokens: recent = budget / 2 of them`."""
    by = "" if keep.by is None else print_expression(keep.by)
    if keep.scope == "where" or keep.count is None:
        return f"the tokens where {by}"
    if keep.count == Number(value=1) and keep.scope != "top":
        return f"the {keep.scope} token"
    which = f"tokens with the highest {by}" if keep.scope == "top" else f"{keep.scope} tokens"
    return f"the {which}: {_count(keep.count, policy)} of them"


def _param(param: Param) -> str:
    unit = f" {param.unit}" if param.unit else ""
    low, high = ("" if end is None else f"{end:g}" for end in (param.low, param.high))
    bounds = f", in {low}..{high}" if low or high else ""
    rate = "; below 1 it is a rate of the prompt" if param.name == "budget" else ""
    return f"{param.name} = {print_expression(param.default)}{unit}{bounds}{rate}"


def _tracks(column: ColumnPlan) -> str:
    return f"{column.name}: {_meaning(column)}"


def _meaning(column: ColumnPlan) -> str:
    """What a state column holds, in words."""
    if column.rule == "token":
        return f"{column.meaning}, once, when the token comes in"
    what = _FOLDS.get(column.rule, column.rule)
    return f"{what} of {column.meaning} over the queries that see the token"


_FOLDS = {
    "sum": "the sum",
    "max": "the largest",
    "min": "the smallest",
    "last": "the newest",
    "squares": "the sum of squares",
}


def _costs(sizes: Sizes, head_dim: int, dtype: str) -> Iterator[str]:
    extra = sizes.position + sizes.state
    share = 100 * extra / sizes.key_and_value
    yield (
        f"{sizes.total} bytes a token and KV head at head size {head_dim} in {dtype}: {sizes.key_and_value} for key and value, "
        f"{sizes.position} for the position, {sizes.state} of state ({share:.1f} % on top)"
    )


# -- codes -------------------------------------------------------------------------------------------------------------


def _explain_code(name: str, as_json: bool) -> None:
    from kvdsl.codes import CODES
    from kvdsl.diagnostics import did_you_mean, wants_color

    code = CODES.get(name)
    if code is None:
        error(f"there is no code {name}", did_you_mean(name, CODES))
        finish(2)
    if as_json:
        fields = {"code": code.id, "severity": code.severity, "title": code.title, "explanation": code.explanation}
        print_json(fields | {"example": code.example, "settings": dict(code.settings)})
        return
    click.secho(f"{code.severity} {code.id}: {code.title}", bold=wants_color())
    click.echo("\n" + textwrap.fill(code.explanation, _WIDTH))
    if code.example and len(code.example) < 2_000:
        options = "".join(f" --set {key}={value}" for key, value in code.settings)
        click.echo(f"\nFor example, `kvdsl check{options}` refuses this:\n")
        click.echo(textwrap.indent(code.example, "    "), nl=False)
