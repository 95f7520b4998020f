"""Triton's interpreter as the tests want it, and kernels of policies that no package was written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps
from inspect import signature
from pathlib import Path
from random import Random
from threading import Semaphore, Thread
from typing import Any

import numpy as np
import pytest

from kvdsl.compiler import package
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.sizes import Sizes
from kvdsl.runtime.spec import PolicySpec
from tests.differential.traces import Trace, spec_of

SOURCE = "kernels_triton.py"


def make_places_equal(patch: pytest.MonkeyPatch) -> None:
    """A product is the same wherever it lies in a tile, as it is on a GPU.

    The interpreter's `tl.dot` is NumPy's product in the dtype of the result, whose last bit depends on the row and the column. Two
    kernels that give a slot different places then see different scores, and the only slot of a one-token prompt lies above its own
    mean. Taken in float64 and rounded once, it is the same everywhere. Products of bfloat16 are taken of the numbers, not of their bits.
    """
    from triton.runtime import interpreter

    def create_dot(_builder: Any, left: Any, right: Any, total: Any, *_how: Any) -> Any:
        product = np.matmul(_numbers(left), _numbers(right), dtype=np.float64).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _numbers(operand: Any) -> np.ndarray:
    """What a tensor of the interpreter holds; NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    import triton.language as tl

    if operand.dtype.scalar != tl.bfloat16:
        return np.asarray(operand.data)
    return (operand.data.astype(np.uint32) << 16).view(np.float32)


def know_truth_values(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.3's interpreter lacks the type of conditions, which its language asks it for."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter.InterpreterBuilder, "get_int1_ty"):
        patch.setattr(interpreter.InterpreterBuilder, "get_int1_ty", lambda _: tl.int1, raising=False)


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Let `triton.language` mean NumPy from the first launch on.

    The interpreter looks through all of it at every launch and at every call inside of a kernel, and puts it back after the launch.
    That takes most of its time.
    """
    from triton.runtime import interpreter

    scope = getattr(interpreter, "_LangPatchScope", None)  # before Triton 3.6 nothing was put back
    known: set[str] = set()
    replace_operations = interpreter._patch_lang

    def once(function: Any) -> Any:
        if function.__module__ not in known:
            known.add(function.__module__)
            replace_operations(function)
        return scope and scope()  # of nothing, so that nothing is put back

    patch.setattr(interpreter, "_patch_lang", once)
    of_numbers = cache(interpreter._get_np_dtype)  # it makes its table anew at every call
    address = np.dtype(np.uint64)
    patch.setattr(interpreter, "_get_np_dtype", lambda kind: address if kind.scalar.is_ptr() else of_numbers(kind.scalar))


def shuffle_programs(patch: pytest.MonkeyPatch) -> None:
    """A launch's programs run one after another, in an order that depends on the grid alone: as on a GPU, the last is any of them."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    begin, turn_to = builder.set_grid_dim, builder.set_grid_idx
    orders: dict[tuple[int, ...], list[tuple[int, ...]]] = {}

    def set_grid_dim(self: Any, *grid: int) -> None:
        begin(self, *grid)
        programs = list(np.ndindex(*grid))
        orders.setdefault(grid, Random(str(grid)).sample(programs, len(programs)))

    def set_grid_idx(self: Any, *program: int) -> None:
        turn_to(self, *orders[self.grid_dim][np.ravel_multi_index(program, self.grid_dim)])

    patch.setattr(builder, "set_grid_dim", set_grid_dim)
    patch.setattr(builder, "set_grid_idx", set_grid_idx)


def let_programs_wait(patch: pytest.MonkeyPatch) -> None:
    """A launch's programs take turns, as those of a cooperative launch may: each goes on until its next atomic operation."""
    from triton.runtime import interpreter

    begin, operate = interpreter.GridExecutor.__init__, interpreter.InterpreterBuilder.create_atomic_rmw
    replace_operations = interpreter._patch_lang

    def create_atomic_rmw(self: Any, *operands: Any) -> Any:
        found = operate(self, *operands)
        _Turn.current.pause()
        return found

    def __init__(self: Any, function: Any, *rest: Any, **others: Any) -> None:
        begin(self, function, *rest, **others)
        turns: list[_Turn] = []
        order = Random(str(self.grid))

        @wraps(function)
        def one_of_all(**arguments: Any) -> None:
            """Begin a program; behind the last one, let all end."""
            turns.append(_Turn(partial(function, **arguments), interpreter.interpreter_builder))
            turns[-1].go_on()
            waiting = turns if len(turns) == np.prod(interpreter.interpreter_builder.grid_dim) else []
            while waiting := [turn for turn in waiting if turn.is_alive()]:
                order.choice(waiting).go_on()

        one_of_all.__signature__ = signature(function)  # type: ignore[attr-defined]
        self.fn = one_of_all

    patch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
    patch.setattr(interpreter.GridExecutor, "__init__", __init__)
    patch.setattr(
        interpreter, "_patch_lang", lambda function: replace_operations(getattr(function, "__wrapped__", function))
    )


class _Turn(Thread):
    """A program of a launch, in a thread that runs only from `go_on` to `pause`."""

    current: _Turn

    def __init__(self, program: Callable[[], None], builder: Any) -> None:
        super().__init__(daemon=True)
        self._program, self._builder, self._place = program, builder, builder.grid_idx
        self._begins, self._pauses = Semaphore(0), Semaphore(0)
        self._done = False
        self._error: Exception | None = None
        self.start()

    def go_on(self) -> None:
        """Run the program until it pauses or ends."""
        _Turn.current, self._builder.grid_idx = self, self._place
        self._begins.release()
        self._pauses.acquire()
        if self._done:
            self.join()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Let others run."""
        self._pauses.release()
        self._begins.acquire()

    def run(self) -> None:
        self._begins.acquire()
        try:
            self._program()
        except Exception as error:
            self._error = error
        self._done = True
        self._pauses.release()


def watch_overflow(patch: pytest.MonkeyPatch, watch: bool = True) -> None:
    """Whether every sum and product of integers is taken once more in 64 bits, to see that it fits."""
    from triton.runtime import interpreter

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=watch)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def make_blocks_small(patch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 slots, so that a few slots are several blocks, the last of them not full, and are shared by several programs."""
    import triton.language as tl

    patch.setattr("kvdsl.runtime.gpu.backend._PROCESSORS_IN_THE_INTERPRETER", 16)
    patch.setattr("kvdsl.runtime.gpu.sizes.SPLIT", 32)
    patch.setattr(Sizes, "attend_block", 16)
    patch.setattr(Sizes, "settle_block", 16)
    patch.setattr(Sizes, "alone_block", 16)
    patch.setattr("kvdsl.runtime.gpu.evicting.WIDE", tl.constexpr(16))
    for module in ("sizes", "prompt"):
        patch.setattr(f"kvdsl.runtime.gpu.{module}.COMPARED", 16)
    patch.setattr(Sizes, "choose_block", lambda sizes, pages: 8 if pages else 64)
    patch.setattr(Sizes, "look_block", lambda sizes, dims: 32)
    patch.setattr("kvdsl.runtime.state.room._GROWTH", 32)


def with_kernels(policy: Policy, folder: Path) -> PolicySpec | None:
    """What kvdsl compiles a policy to, with its Triton kernels written into `folder`; None if it has none."""
    files = package(policy, print_policy(policy))
    if SOURCE not in files:
        return None
    source = folder / policy.stem / SOURCE
    source.parent.mkdir(parents=True)
    source.write_text(files[SOURCE], encoding="utf-8")
    return replace(spec_of(policy, files), triton_source=source)


def heads_for(policy: Policy) -> int:
    """How many KV heads a trace needs: heads that have nothing in common are programs apart, of which one says what the others would."""
    return 2 if policy.tensors or "heads" in print_policy(policy) else 1


def defined(trace: Trace) -> Trace:
    """The trace without infinities: what remains of an infinite vector after a turn is not defined."""
    return replace(trace, inputs="nan") if trace.inputs == "inf" else trace
