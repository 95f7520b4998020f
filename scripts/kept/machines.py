"""Policies run through a text: in the interpreter, and on the backends."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvdsl.compiler import package
from kvdsl.interp import Call, Layer, resolve_heads
from kvdsl.interp.attention import Rope as ExactRope
from kvdsl.ir.printer import print_policy
from kvdsl.loading import class_in_memory
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import introduce, slot_state
from kvdsl.runtime.tensors import Tensors
from kvdsl.runtime.torch.backend import TorchBackend
from kvdsl.tensorfile import Stored, written

from .texts import DIMS, GROUP, HEADS, Array, Forward, Subject, forwards, tensors

BACKENDS = ("torch", "cpu", "triton")
SOURCES = {"cpu": "kernels_cpu.cpp", "triton": "kernels_triton.py"}
"""The file of a package in which a backend's kernels are; torch serves everything."""

SCALING = DIMS**-0.5
PAIRS = 100.0 ** -(np.arange(DIMS // 2) / (DIMS // 2))
"""What the rotation of each pair of dims is, a place."""

Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Seen:
    """What a forward left.

    Attributes:
        kept: the positions that each KV head holds, layer by layer.
        read: what each KV head attended to, under `group each` each of its query heads; nothing of a prompt, or without selection.
        out: the attention's output, [layers, heads, tokens, group, dims].
    """

    kept: Places
    read: Places
    out: Array


# -- the interpreter -----------------------------------------------------------------------------------------------------


def interpreted(subject: Subject, text: str) -> list[Seen]:
    """What the policy means: every forward of a text in the interpreter, which remembers all."""
    policy, files, settings = subject.policy, tensors(subject), subject.given(text)
    call = Call(SCALING, rope=ExactRope(PAIRS, "half", 0))
    heads, seen, layer, made = None, 0, None, []
    for forward in forwards(subject, text):
        tokens = forward.key.shape[2]
        seen += tokens
        if tokens > 1:
            where = {"heads": HEADS, "tensors": files}
            numbers = [resolve_heads(policy, settings, seen, own, subject.layers, **where) for own in range(subject.layers)]
            layer = Layer(policy, numbers, call, HEADS, tensors=files)
        assert layer is not None
        heads = heads or layer.empty(DIMS, DIMS)
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in (forward.query, forward.key, forward.value))
        given = {name: x.reshape(-1, tokens) for name, x in forward.given.items()}
        if tokens > 1:
            steps = layer.prefill(heads, query, key, value, given)
        else:
            steps = layer.decode(heads, query[:, 0], key[:, 0], value[:, 0], given)
        selects = tokens == 1 and any(step.selected is not None for step in steps)
        out = np.stack([step.out.reshape(tokens, GROUP, DIMS) for step in steps])
        made.append(
            Seen(
                tuple(_ascending(step.kept) for step in steps),
                tuple(_ascending(own) for step in steps for own in step.reads) if selects else (),
                out.reshape(subject.layers, HEADS, tokens, GROUP, DIMS),
            )
        )
    return made


# -- backends ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A policy's package: the spec, with the files that it reads, and the sources by name."""

    spec: PolicySpec
    files: Mapping[str, str]

    def serves(self, backend: str) -> bool:
        """Whether the backend has kernels of it."""
        return backend == "torch" or SOURCES[backend] in self.files


def compiled(subject: Subject) -> Compiled:
    """What kvdsl compiles a policy to."""
    policy = subject.policy
    files = package(policy, print_policy(policy))
    spec: PolicySpec = class_in_memory(policy, files).spec
    if spec.tensors is not None:
        stored = {name: Stored("F32", x.shape, x.astype("<f4").tobytes()) for name, x in tensors(subject).items()}
        content = written(stored)
        digest = hashlib.sha256(content).hexdigest()
        path = _folder() / f"{digest}.safetensors"
        path.write_bytes(content)
        spec = replace(spec, tensors=Tensors(path, digest, spec.tensors.tensors))
    return Compiled(spec, files)


@cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="kvdsl-kept-")
    _FOLDERS.append(made)
    return Path(made.name).resolve()


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Which go with the process."""


def built(backend: str, packages: Mapping[str, Compiled]) -> dict[str, Any]:
    """A backend for each policy, by stem, that has such kernels."""
    served = {stem: one for stem, one in packages.items() if one.serves(backend)}
    if backend == "torch":
        return {stem: TorchBackend() for stem in served}
    if backend == "cpu":
        from tests.differential.units import build

        return dict(build({stem: (one.files[SOURCES[backend]], one.spec, torch.float32) for stem, one in served.items()}))
    return {stem: _triton(stem, one) for stem, one in served.items()}


def _triton(stem: str, one: Compiled) -> Any:
    from kvdsl.runtime.gpu.backend import TritonBackend

    _tuned_interpreter()
    source = Path(tempfile.mkdtemp(dir=_folder())) / stem / SOURCES["triton"]
    source.parent.mkdir()
    source.write_text(one.files[SOURCES["triton"]], encoding="utf-8")
    return TritonBackend(replace(one.spec, triton_source=source), torch.device("cpu"), torch.float32)


@cache
def _tuned_interpreter() -> None:
    """Triton's interpreter as the tests have it: faster, and products that do not depend on a tile's place."""
    import pytest

    from tests.triton.interpreter import know_truth_values, make_places_equal, patch_language_once, watch_overflow

    patch = pytest.MonkeyPatch()  # for as long as the process lasts
    for tune in (know_truth_values, patch_language_once, make_places_equal):
        tune(patch)
    watch_overflow(patch, False)


def served(
    subject: Subject, text: str, backend: Any, spec: PolicySpec, most: int | None = None, shaken: float = 0.0
) -> list[Seen]:
    """Every forward of a text on a backend, or the first ones; nothing is said of what it attended to but by the output."""
    given = dict.fromkeys(spec.params) | subject.given(text)
    states = [slot_state(spec, given, layer=layer, layers=subject.layers) for layer in range(subject.layers)]
    introduce(states)
    rope = Rope(torch.from_numpy(PAIRS), "half", 0)
    made = []
    for forward in forwards(subject, text, shaken)[:most]:
        for state in states:
            if state.choices is not None:
                state.choices.begin(state.layer)
        run = backend.prefill if forward.key.shape[2] > 1 else backend.decode
        calls = [_call(forward, layer, spec, rope) for layer in range(subject.layers)]
        outs = [run(state, call) for state, call in zip(states, calls, strict=True)]
        kept = tuple(_ascending(own[own >= 0].numpy()) for state in states for own in state.position[0])
        out = torch.stack([own[0].unflatten(1, (HEADS, GROUP)).transpose(0, 1) for own in outs])
        made.append(Seen(kept, (), out.double().numpy()))
    return made


def _call(forward: Forward, layer: int, spec: PolicySpec, rope: Rope) -> AttentionCall:
    query = forward.query[layer].transpose(0, 2, 1, 3).reshape(HEADS * GROUP, -1, DIMS)
    supplied = None
    if spec.supplied:
        supplied = _tensor(np.stack([forward.given[name][layer] for name, _ in spec.supplied]))[:, None]
    key, value = (_tensor(x[layer])[None] for x in (forward.key, forward.value))
    return AttentionCall(_tensor(query)[None], key, value, None, SCALING, rope=rope, supplied=supplied)


def _tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))


def _ascending(positions: Sequence[int] | Array) -> tuple[int, ...]:
    return tuple(sorted(int(position) for position in positions))
