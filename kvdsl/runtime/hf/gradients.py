"""Gradients do not pass through a cache: it keeps numbers and no graph. Whoever asks for them is told so, and nobody else.

A forward that forgets `torch.no_grad()` is right all the same, so the error waits for `backward()`. What raises it is an operator,
because `torch.compile` traces a backward long before it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.call import AttentionCall

_operators = torch.library.Library("kvdsl", "FRAGMENT")
_operators.define("attended(Tensor out, Tensor query, Tensor key, Tensor value) -> Tensor")
_operators.define(
    "refuse_gradient(Tensor gradient, SymInt[] query, SymInt[] key, SymInt[] value) -> (Tensor, Tensor, Tensor)"
)


def refusing(out: Tensor, call: AttentionCall) -> Tensor:
    """What attention returns, so that its gradient is an error, if somebody could ask for it."""
    inputs = (call.query, call.key, call.value)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return out
    attended: Tensor = torch.ops.kvdsl.attended(out, *inputs)
    return attended


def _copied(out: Tensor, *inputs: Tensor) -> Tensor:
    return out.clone()


def _refused(gradient: Tensor, *sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    raise KvdslError(
        "gradients do not pass through a kvdsl cache, which keeps no graph: run what needs none under `torch.no_grad()`, and train "
        "without the cache"
    )


def _note_sizes(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.sizes = [x.shape for x in inputs[1:]]  # no tensor is kept


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return None, *torch.ops.kvdsl.refuse_gradient(gradient, *ctx.sizes)


_operators.impl("attended", _copied, "CompositeExplicitAutograd")
_operators.impl("refuse_gradient", _refused, "CompositeExplicitAutograd")
torch.library.register_fake("kvdsl::attended", _copied, lib=_operators)
torch.library.register_fake(
    "kvdsl::refuse_gradient", lambda gradient, *sizes: tuple(gradient.new_empty(size) for size in sizes), lib=_operators
)
torch.library.register_autograd("kvdsl::attended", _backward, setup_context=_note_sizes, lib=_operators)
