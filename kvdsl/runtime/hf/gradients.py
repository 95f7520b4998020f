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


class Gradients:
    """Whether somebody may want a gradient of what a layer has cached."""

    _asked = False

    def refused(self, out: Tensor, call: AttentionCall) -> Tensor:
        """What attention returns, so that its gradient is an error if it could be wanted, of this forward or of what is cached.

        Queries, keys, values, sinks and slopes that require a gradient have one without us.
        """
        asked = [x for x in (call.query, call.key, call.value, call.sinks, call.slopes) if x is not None and x.requires_grad]
        if asked:
            self._asked = True  # written and not read, so that no graph is compiled anew for it
        elif not self._asked:
            return out
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
