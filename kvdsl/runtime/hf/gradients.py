"""An error for gradients through a cache, which keeps no graph.

A forward without `torch.no_grad()` is valid, so the error is raised in `backward()`. An operator raises it, because `torch.compile` traces
a backward long before it runs. The gradient may be of what an earlier forward cached, such as a soft prompt before a frozen model.
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
"""Stands for cached tensors that required a gradient; their graphs are gone."""


class Gradients:
    """Detects whether a gradient through a layer's cache may be needed."""

    _asked = False

    def refused(self, out: Tensor, call: AttentionCall) -> Tensor:
        """Return attention's output so that its gradient raises an error, if an input of this or an earlier forward requires one."""
        asked = [x for x in (call.query, call.key, call.value, call.sinks, call.slopes) if x is not None and x.requires_grad]
        if asked:
            self._asked = True  # only written here: reading it would make torch recompile
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
