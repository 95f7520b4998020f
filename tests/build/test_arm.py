"""The C++ on a 64-bit ARM, emulated: it keeps the tokens that it keeps here, and computes the same."""

from __future__ import annotations

import copy
import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.build.cxx import DRIVER, EXACT, FLAGS, INCLUDE
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend, _prompt_args
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.prompt import Prompt

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MAIN = Path(__file__).with_name("emulated.cpp")
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
CASES = {"roco": torch.float32, "knorm": torch.bfloat16, "equip_h2o": torch.float16, "roco_sparcas": torch.float32}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A policy's C++ as a program for the other processor; the driver is compiled once."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}")
    folder = tmp_path_factory.mktemp("arm")
    flags = [COMPILER, *(flag for flag in FLAGS if flag != "-march=native"), f"-I{INCLUDE}", f"-I{DRIVER}"]

    def build(*command: str | Path) -> None:
        done = subprocess.run([*flags, *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    objects = []
    for source in (*sorted(DRIVER.glob("*.cpp")), MAIN):
        objects.append(folder / f"{source.stem}.o")
        build("-c", source, "-o", objects[-1])

    def program(source: Path) -> Path:
        build(*EXACT, "-static", source, *objects, "-o", folder / source.parent.name)
        return folder / source.parent.name

    return program


class Emulated(CpuBackend):
    """Its kernels run on another processor: what they are given is sent to it, and what comes back takes its place."""

    def __init__(self, spec: PolicySpec, dtype: torch.dtype, program: Path) -> None:
        super().__init__(spec, torch.device("cpu"), dtype)
        self.program, self.dtype = program, dtype

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        batch, heads, tokens, _ = call.query.shape
        state.make_room(tokens)
        out = call.value.new_empty(batch, tokens, heads, call.value.shape[-1])
        step = self.step(state, call)

        def kernel(args: ctypes._Pointer) -> int:  # type: ignore[type-arg]
            angles = () if step._angles is None else (step._angles.near, step._angles.far)
            return self.run("decode", (*state.tensors().values(), *call[:3], out, step._ring_rows, *angles), args._obj)

        assert step.run(kernel, call, out) == 0
        return out

    def _pass(self, prompt: Prompt, out: Tensor | None) -> None:
        (tensors, *others), args, told = _prompt_args(prompt, out)
        assert self.run("prefill", (*tensors, *others, out), args, told) == 0

    def run(self, name: str, tensors: Iterable[Tensor | None], *structures: ctypes.Structure) -> int:
        """The status; the tensors are as the kernel leaves them."""
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None and tensor.numel()}
        sent, pieces = b"", []
        for structure in structures:
            pointers = [getattr(structure, name) for name, kind in structure._fields_ if kind is ctypes.c_void_p]
            sent += struct.pack("qq", len(pointers), ctypes.sizeof(structure)) + bytes(structure)
            for pointer in pointers:
                sent += struct.pack("q", -1 if pointer is None else sizes[pointer])
                sent += b"" if pointer is None else ctypes.string_at(pointer, sizes[pointer])
                pieces += [] if pointer is None else [pointer]
        command = [EMULATOR, str(self.program), name, NAMES[self.dtype]]
        came = subprocess.run(command, input=sent, capture_output=True, check=True).stdout
        at = 4
        for pointer in pieces:
            ctypes.memmove(pointer, came[at : at + sizes[pointer]], sizes[pointer])
            at += sizes[pointer]
        assert at == len(came)
        return int.from_bytes(came[:4], "little", signed=True)


@pytest.mark.parametrize("policy", CASES)
def test_an_emulated_processor_does_what_this_one_does(policy: str, built: Callable[[Path], Path]) -> None:
    spec, dtype, make = kvdsl.load(policy).spec, CASES[policy], torch.Generator().manual_seed(1)
    here, there = CpuBackend(spec, torch.device("cpu"), dtype), Emulated(spec, dtype, built(spec.cpu_source))
    given = {"budget": 40.0, "tokens": 12.0, "dims": 4.0}
    ours = slot_state(spec, {name: value for name, value in given.items() if name in spec.params}, layer=2, layers=4)
    theirs = copy.deepcopy(ours)
    rope = Rope(100.0 ** -(torch.arange(8, dtype=torch.float64) / 8), "half")

    def call(tokens: int) -> AttentionCall:
        query, key, value = (torch.randn(2, heads, tokens, 16, generator=make).to(dtype) for heads in (6, 2, 2))
        return AttentionCall(query, key, value, None, 0.25, rope=rope)

    for tokens in (60, 1, 1, 3, 1, 1, 20, 1, 1):
        one = call(tokens)
        outs = [
            backend.prefill(state, one) if tokens > 3 else backend.decode(state, one)
            for backend, state in ((here, ours), (there, theirs))
        ]
        torch.testing.assert_close(*outs, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        live = ours.position >= 0
        assert torch.equal(ours.position, theirs.position)
        assert torch.equal(ours.keys[live], theirs.keys[live]) and torch.equal(ours.values[live], theirs.values[live])
        assert not spec.compact or torch.equal(ours.rank, theirs.rank)
        for name, our, their in zip(spec.column_rules, ours.columns, theirs.columns, strict=True):
            close = 0.0 if name == "token" else 1e-5
            torch.testing.assert_close(our[live], their[live], rtol=close, atol=close)
