"""Facts about a policy: its state per token and the reasons, costs, inputs, and backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvdsl.compiler import plan_of
from kvdsl.explain import DTYPES
from kvdsl.ir.nodes import Column, ColumnRef, Expr, Input, Number, ParamRef, Policy, TensorRef, is_call
from kvdsl.ir.ops import INPUTS
from kvdsl.ir.printer import print_budget, print_expression, print_keep, print_select, print_sketch
from kvdsl.ir.visitors import has, parts_of, walk
from kvdsl.lower.plan import PackagePlan
from kvdsl.memory import dtypes_of, keeps_halves, rounds_to, slots_of_a_block, vector_bytes
from kvdsl.passes.columns import add_columns
from kvdsl.passes.fold import some, value_of

FLOAT32 = POSITION = RANK = 4
"""Bytes of a number of a state column, of a token's position, and of its rank among the live ones."""


@dataclass(frozen=True)
class State:
    """A state column.

    Attributes:
        size: for a ring, the number of queries, as an expression; None for other columns.
        numbers: float32 numbers per slot; None if it depends on the prompt or the layer.
        why: the statements, or other columns, that read it.
    """

    name: str
    rule: str
    body: str
    decay: str | None
    size: str | None
    numbers: int | None
    why: tuple[str, ...]

    @property
    def bytes_per_slot(self) -> int | None:
        return None if self.numbers is None else FLOAT32 * self.numbers


@dataclass(frozen=True)
class Peak:
    """The most slots of a KV head in a phase, as an expression of the language and with the defaults.

    `slots` is None if it depends on the text.
    """

    phase: str
    text: str
    slots: int | None


@dataclass(frozen=True)
class Budget:
    """The budget of some KV heads of a layer, chosen by a tensor, as an expression of the language and with the defaults.

    `tokens` is None if it depends on the text or the file.
    """

    text: str
    tokens: int | None


@dataclass(frozen=True)
class Facts:
    """All facts, for a head size and a dtype.

    Attributes:
        values: the params' defaults, and the budget as `@budget`, where they are plain numbers.
        requires: some of attn, logit, q, k, v.
        budgets: of the KV heads of a layer if they differ; else empty.
    """

    policy: Policy
    plan: PackagePlan
    head_dim: int
    dtype: str
    values: dict[str, float] = field(repr=False)
    state: tuple[State, ...]
    peaks: tuple[Peak, ...]
    requires: tuple[str, ...]
    budgets: tuple[Budget, ...]
    kv_dtype: str = "model"

    @property
    def bytes_per_head(self) -> tuple[int | None, int | None]:
        """Bytes of a KV head with the smallest of `budgets` and with the largest; None if unknown."""
        known = [budget.tokens for budget in self.budgets if budget.tokens is not None]
        least = self.bytes_per_token * min(known) if known else None
        return least, self.bytes_per_token * max(known) if known and len(known) == len(self.budgets) else None

    @property
    def key_and_value(self) -> int:
        """Bytes of one token's key and value."""
        if self.kv_dtype != "model":
            return sum(vector_bytes(one, self.head_dim) for one in dtypes_of(self.kv_dtype))
        return 2 * self.head_dim * DTYPES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's state, if its size is known, without columns freed after the prompt."""
        return sum(column.bytes_per_slot or 0 for column in self.state if not self.goes(column))

    def goes(self, column: State) -> bool:
        """Return whether a column exists only while a prompt is read."""
        return column.rule == "ring" and add_columns(self.policy).forgets

    @property
    def rotated_half(self) -> int:
        """Bytes of one key's rotated half, if all dims rotate and a backend caches it."""
        return self.head_dim * DTYPES[self.dtype] if self.policy.rope == "cached" else 0

    @property
    def position_bytes(self) -> int:
        """Bytes of one token's position, and of its rank under compact positions."""
        return POSITION + (RANK if self.policy.positions == "compact" else 0)

    @property
    def sketch_bytes(self) -> int | None:
        """Bytes of one key over the sketch's dims, which kernels keep in selecting layers; None if the number of dims is unknown."""
        if self.policy.sketch is None or self.plan.cpp is None:
            return 0
        dims = value_of(self.policy.sketch.count, self.values)
        return None if dims is None else int(dims) * self._of_a_number

    @property
    def page_bytes(self) -> float | None:
        """One token's share of the smallest and largest key of its page, which kernels also store."""
        select = None if self.plan.cpp is None else self.plan.cpp.select
        if self.policy.pages is None or select is None or select.by != "page_bound":
            return 0
        tokens = value_of(self.policy.pages, self.values)
        return None if tokens is None else 2 * self.head_dim * self._of_a_number / max(1, int(tokens))

    @property
    def _of_a_number(self) -> int:
        """Bytes of a number in the copies that kernels keep beside keys: float32 beside keys in another `kv_dtype` than the model's."""
        return DTYPES[self.dtype if self.kv_dtype == "model" else "float32"]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one KV head of one layer, if the size of its state is known."""
        return self.key_and_value + self.position_bytes + self.state_bytes

    @property
    def beyond_a_window(self) -> int:
        """Bytes of a token in addition to those in a window, which stores only keys, values and positions."""
        return self.bytes_per_token - self.key_and_value - POSITION + self.rotated_half

    @property
    def backends(self) -> list[dict[str, Any]]:
        """Each backend: whether it serves the policy, or why not; on `cpu`, for what torch evicts instead of C++."""
        refused = self.plan.refusals
        told = [
            {"name": name, "ok": name not in refused, "why_not": refused.get(name)} for name in ("cpu", "torch", "triton")
        ]
        if self.plan.cpp is not None and self.plan.cpp.beyond:
            told[0]["torch_evicts"] = self.plan.cpp.beyond
        return told


def facts(policy: Policy, head_dim: int = 128, dtype: str = "bfloat16", kv_dtype: str = "model") -> Facts:
    """Return the facts about a checked policy in a model with this head size and dtype, and in a cache with this `kv_dtype`."""
    values = _values(policy)
    read = {node.name for _, expr in policy.statements() for node in parts_of(expr, Input)}
    return Facts(
        policy=policy,
        plan=plan_of(policy),
        head_dim=head_dim,
        dtype=dtype,
        values=values,
        state=state_of(policy, values),
        peaks=tuple(_peaks(policy, values)),
        requires=tuple(name for name, row in INPUTS.items() if row.reads and name in read),
        budgets=tuple(_budgets(policy, values)),
        kv_dtype=kv_dtype,
    )


def laid_out(policy: Policy, *, storage: str | None = None, rope: str | None = None, kv_dtype: str | None = None) -> Policy:
    """Return the policy with these options of memory layout. Checks that `kv_dtype`, an argument of `facts`, fits them.

    Raises:
        KvdslError: if the options do not fit together.
    """
    changes: dict[str, Any] = {}
    if storage is not None:
        block = slots_of_a_block(storage)
        changes = {"storage": "blocks", "block": Number(value=block)} if block else {"storage": "in_place", "block": None}
    if rope is not None:
        changes["rope"] = "cached" if keeps_halves(rope, policy.name, compact=policy.positions == "compact") else "fused"
    found = policy.model_copy(update=changes)
    rounds_to(kv_dtype or "model", policy.name, halves=found.rope == "cached")
    return found


def _values(policy: Policy) -> dict[str, float]:
    """Return the values of params and of the budget that are known; each may depend on others, before or after it."""
    values: dict[str, float] = {}
    before = -1
    while len(values) > before:
        before = len(values)
        for param in policy.params:
            value = value_of(param.default, values)
            if value is not None:
                values[param.name] = value
        budget = None if policy.budget is None else value_of(policy.budget, values)
        if budget is not None and budget >= 1:  # below 1 it is a ratio
            values["@budget"] = float(int(budget))
    return values


# -- state -------------------------------------------------------------------------------------------------------------


def state_of(policy: Policy, values: dict[str, float]) -> tuple[State, ...]:
    """Return the state columns of a policy; `values` are its params with plain numbers as defaults."""
    lowered = add_columns(policy)
    return tuple(_state(column, lowered, values) for column in lowered.columns)


def _state(column: Column, lowered: Policy, values: dict[str, float]) -> State:
    size = None if column.size is None else value_of(column.size, values)
    return State(
        name=column.name,
        rule=column.rule,
        body=print_expression(column.body),
        decay=None if column.decay is None else print_expression(column.decay),
        size=None if column.size is None else print_expression(column.size),
        numbers=1 if column.size is None else None if size is None else max(1, int(size)),
        why=tuple(_readers(column, lowered)),
    )


def _readers(column: Column, lowered: Policy) -> Iterator[str]:
    def reads(expr: Expr) -> bool:
        return has(expr, ColumnRef, name=column.name)

    yield from dict.fromkeys(name for name, expr in lowered.statements() if reads(expr))
    yield from (other.name for other in lowered.columns if other is not column and reads(other.body))


# -- how many slots ----------------------------------------------------------------------------------------------------


def tensors_of(expr: Expr, policy: Policy) -> tuple[str, ...]:
    """Return the tensors that an expression reads, directly or through defaults of params, each once."""
    defaults = {param.name: param.default for param in policy.params}
    found: dict[str, None] = {}
    for node in walk(expr):
        match node:
            case TensorRef(name=name):
                found[name] = None
            case ParamRef(name=name) if name in defaults:
                found |= dict.fromkeys(tensors_of(defaults[name], policy))
    return tuple(found)


def _budgets(policy: Policy, values: dict[str, float]) -> Iterator[Budget]:
    """Yield the budgets among which a tensor chooses, or the one computed from it."""
    if policy.budget is None or not tensors_of(policy.budget, policy):
        return
    for branch in dict.fromkeys(_branches(policy.budget, policy)):
        tokens = value_of(branch, values)
        yield Budget(print_expression(branch), None if tokens is None or tokens < 1 else int(tokens))


def _branches(expr: Expr, policy: Policy) -> Iterator[Expr]:
    """Yield the possible values of an expression whose conditions read tensors."""
    if is_call(expr, "where") and tensors_of(expr.args[0], policy):
        for branch in expr.args[1:]:
            yield from _branches(branch, policy)
    else:
        yield expr


def _peaks(policy: Policy, values: dict[str, float]) -> Iterator[Peak]:
    """The slots in use while a query attends, before the eviction."""
    if policy.budget is None:
        yield Peak("always", "every token", None)
        return
    yield _while_prompting(policy, values)
    yield _while_decoding(policy, values)


def _while_prompting(policy: Policy, values: dict[str, float]) -> Peak:
    if _stays_whole(policy, values):
        return Peak("prompt", "the prompt", None)
    if policy.prefill_block is None:
        layers = "all layers" if policy.victims == "layers" or policy.across_layers is not None else "one layer"
        return Peak("prompt", f"the prompt, in {layers} at a time", None)
    block, trigger, slack = (value_of(expr, values) for expr in (policy.prefill_block, policy.trigger, policy.slack))
    text = print_expression(policy.prefill_block)
    if policy.max_drop != Number(value=0):
        text = f"max({print_expression(policy.trigger)} - 1, {print_expression(policy.slack)}) + {text}"
    elif policy.trigger != Number(value=1):
        text = f"{print_expression(policy.trigger)} - 1 + {text}"
    if block is None or trigger is None or slack is None:
        return _sum("prompt", policy, values, text, None)
    left = max(some(trigger) - 1, int(slack) if policy.max_drop != Number(value=0) else 0)
    return _sum("prompt", policy, values, text, left + max(1, int(block)))


def _stays_whole(policy: Policy, values: dict[str, float]) -> bool:
    """Return whether nothing is evicted while the prompt is read."""
    trigger = value_of(policy.trigger, values)
    return policy.when == "decode" or (trigger is not None and some(trigger) == 0)


def _while_decoding(policy: Policy, values: dict[str, float]) -> Peak:
    trigger = value_of(policy.trigger, values)
    if policy.measured is not None and policy.budget == Input(name="everything") and policy.when != "prefill":
        return Peak("decode", "unbounded: the budget has no `at most`", None)
    if policy.when == "prefill" or (trigger is not None and some(trigger) == 0 and policy.cap == "soft"):
        return Peak("decode", "every generated token stays", None)
    slack = value_of(policy.slack, values)
    if _stays_whole(policy, values):
        room = print_expression(policy.slack if policy.cap == "hard" else policy.trigger)
        return Peak("decode", f"no more than the prompt + 1, or budget + {room} if that is more", None)
    # An incomplete last block of a prompt stays until a token has been generated.
    if policy.prefill_block is not None:
        return replace(_while_prompting(policy, values), phase="decode")
    if policy.cap == "hard":
        return _sum("decode", policy, values, print_expression(policy.slack), None if slack is None else int(slack))
    more, text = None if trigger is None else some(trigger), print_expression(policy.trigger)
    if policy.max_drop != Number(value=0):
        text = f"max({text}, {print_expression(policy.slack)} + 1)"
        more = None if more is None or slack is None else max(more, int(slack) + 1)
    return _sum("decode", policy, values, text, more)


def _sum(phase: str, policy: Policy, values: dict[str, float], text: str, more: int | None) -> Peak:
    budget = values.get("@budget")
    whole = "budget" if more == 0 else f"budget + {text}"
    return Peak(phase, whole, None if budget is None or more is None else int(budget) + more)


# -- as data -----------------------------------------------------------------------------------------------------------


def as_data(found: Facts) -> dict[str, Any]:
    """Return the facts for JSON."""
    policy = found.policy
    return {
        "name": policy.name,
        "stem": policy.stem,
        "doc": policy.doc,
        "budget": None if policy.budget is None else print_budget(policy),
        "score": _printed(policy.score),
        "keeps": [print_keep(keep) for keep in policy.keeps],
        "select": None if policy.select is None else print_select(policy.select),
        "sketch": None if policy.sketch is None else print_sketch(policy.sketch),
        "pages": _printed(policy.pages),
        "pages_after": _printed(policy.pages_after),
        "tensors": [{"name": one.name, "axes": list(one.axes), "file": one.file} for one in policy.tensors],
        "given": [{"name": one.name, "default": one.default} for one in policy.given],
        "when": policy.when,
        "positions": policy.positions,
        "rope": policy.rope,
        "storage": policy.storage,
        "block": _printed(policy.block) if policy.storage == "blocks" else None,
        "victims": policy.victims,
        "state": [
            {
                "name": column.name,
                "axes": ["slot"] if column.size is None else ["slot", "query"],
                "dtype": "float32",
                "bytes_per_slot": column.bytes_per_slot,
                "rule": column.rule,
                "body": column.body,
                "size": column.size,
                "read_by": list(column.why),
            }
            for column in found.state
        ],
        "requires": list(found.requires),
        "bytes_per_token": found.bytes_per_token,
        "bytes": {
            "key_and_value": found.key_and_value,
            "position": found.position_bytes,
            "state": found.state_bytes,
            "rotated_half": found.rotated_half,
            "sketch": found.sketch_bytes,
            "pages": found.page_bytes,
            "head_dim": found.head_dim,
            "kv_dtype": found.kv_dtype,
        },
        "budgets": [{"expression": budget.text, "tokens": budget.tokens} for budget in found.budgets],
        "bytes_per_head": list(found.bytes_per_head) if found.budgets else None,
        "peak": [{"phase": peak.phase, "slots": peak.slots, "expression": peak.text} for peak in found.peaks],
        "backends": found.backends,
    }


def _printed(expr: Expr | None) -> str | None:
    return None if expr is None else print_expression(expr)
