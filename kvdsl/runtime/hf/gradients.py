"""Gradients do not pass through a cache: it keeps numbers and no graph. Whoever asks for them is told so, and nobody else.

A forward that forgets `torch.no_grad()` is right all the same, so the error waits for `backward()`. What raises it is an operator,
because `torch.compile` traces a backward long before it runs. What an earlier forward cached may be asked for as well: a soft prompt,
say, behind which a frozen model runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall

_operators = torch.library.Library("kvdsl", "FRAGMENT")
_operators.define("attended(Tensor out, Tensor[] asked) -> Tensor")
_operators.define("refuse_gradient(Tensor gradient, SymInt[] size) -> Tensor")

_EARLIER = torch.empty(0, requires_grad=True)
"""Stands for what earlier forwards cached and somebody may want a gradient of: their graphs are gone."""


def asking(call: AttentionCall) -> list[Tensor]:
    """What attention depends on and has a gradient without us: queries, keys, values, sinks and slopes that require one."""
    inputs = (call.query, call.key, call.value, call.sinks, call.slopes)
    return [x for x in inputs if x is not None and x.requires_grad]


def refusing(out: Tensor, asked: list[Tensor]) -> Tensor:
    """What attention returns, so that its gradient is an error; `asked` is what `asking` found, or empty: it was cached earlier."""
    attended: Tensor = torch.ops.kvdsl.attended(out, asked or [_EARLIER])
    return attended


def _copied(out: Tensor, asked: list[Tensor]) -> Tensor:
    return out.clone()


def _refused(gradient: Tensor, size: list[int]) -> Tensor:
    raise KvdslError(
        "gradients do not pass through a kvdsl cache, which keeps no graph, of this forward or of those that filled it: run what "
        "needs none under `torch.no_grad()`, and train without the cache"
    )


def _note_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.places = [(x.shape, x.dtype, x.device) for x in inputs[1]]  # no tensor is kept


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, list[Tensor]]:
    refuse = torch.ops.kvdsl.refuse_gradient
    return None, [refuse(gradient, size).to(device, dtype) for size, dtype, device in ctx.places]


_operators.impl("attended", _copied, "CompositeExplicitAutograd")
_operators.impl("refuse_gradient", _refused, "CompositeExplicitAutograd")
torch.library.register_fake("kvdsl::attended", _copied, lib=_operators)
torch.library.register_fake("kvdsl::refuse_gradient", lambda gradient, size: gradient.new_empty(size), lib=_operators)
torch.library.register_autograd("kvdsl::attended", _backward, setup_context=_note_places, lib=_operators)
