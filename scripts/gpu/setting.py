"""What all stages share: sizes, policies, the folder of the results and the lines in it, states and calls."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench import prefill
from kvdsl_lab.bench.baselines import Token
from kvdsl_lab.bench.decode import SETTLING, Shape, decode_step, new_tokens, rotation, steady_state
from scripts.gpu import HAS_TRANSFORMERS, ROOT

STAGES = {"compile": 150, "right": 300, "kernels": 540, "model": 480, "in_place": 110, "language": 200}
"""Their deadlines, in seconds: less than 30 minutes in all."""

POLICIES = ("roco", "h2o", "tova", "streaming_llm", "scissorhands", "equip_blocks", "sparcas")
RACED = ("streaming_llm", "equip_h2o")
"""What is raced against caches that are shifted; EQUIP's two."""


@dataclass(frozen=True)
class Whole:
    """A whole model's run: so many rows of so many tokens, `budget` of which stay, and so many new ones."""

    batch: int
    context: int
    budget: int
    new_tokens: int = 128


@dataclass(frozen=True)
class Held:
    """A cache of so many tokens, for so many rows."""

    batch: int
    tokens: int


@dataclass(frozen=True)
class Sizes:
    """Of everything that is run."""

    checked: tuple[Shape, ...]
    timed: tuple[Shape, ...]
    selecting: tuple[Shape, ...]
    checked_prompts: tuple[prefill.Shape, ...]
    timed_prompts: tuple[prefill.Shape, ...]
    whole: tuple[Whole, ...]
    held: tuple[Held, ...]
    layers: int
    settling: int
    generated: int
    variants: int
    replays: int
    repeats: int
    copied: int
    random_jobs: int
    language_s: float


REAL = Sizes(
    checked=tuple(
        Shape(batch, 4, group, dim, live, dtype)
        for dtype in ("fp32", "fp16", "bf16")
        for batch, group, dim, live in ((1, 4, 128, 1000), (3, 1, 64, 257), (2, 7, 80, 4097), (1, 8, 256, 600))
    ),
    timed=tuple(Shape(batch, 8, 4, 128, live, "bf16") for live, batch in product((4096, 1024, 512, 32768), (1, 8, 64))),
    selecting=tuple(
        Shape(batch, 8, 4, 128, live, "bf16") for batch, live in ((1, 8192), (1, 32768), (8, 32768), (1, 131072))
    ),
    checked_prompts=(  # every one of them is compiled for every policy
        prefill.Shape(1, 2, 4, 128, 2000, "bf16"),
        prefill.Shape(1, 2, 7, 80, 1025, "bf16"),
        prefill.Shape(1, 2, 8, 256, 600, "bf16"),
        prefill.Shape(2, 2, 1, 64, 777, "fp16"),
        prefill.Shape(1, 2, 4, 128, 1000, "fp32"),
    ),
    timed_prompts=tuple(prefill.Shape(1, 8, 4, 128, length, "bf16") for length in (4096, 8192, 32768)),
    whole=(Whole(1, 32768, 4096), Whole(1, 4096, 1024), Whole(64, 4096, 1024), Whole(8, 32768, 4096), Whole(1, 32768, 1024)),
    held=tuple(
        Held(batch, tokens) for batch, tokens in ((8, 512), (8, 1024), (64, 512), (1, 512), (64, 1024), (1, 1024), (8, 4096))
    ),
    layers=32,
    settling=SETTLING,
    generated=24,
    variants=99,
    replays=2000,
    repeats=15,
    copied=1 << 30,
    random_jobs=2000,
    language_s=150,
)
TOY = Sizes(
    checked=(Shape(2, 1, 2, 32, 20, "fp16"),),
    timed=(Shape(1, 1, 2, 32, 20, "fp32"),),
    selecting=(Shape(1, 1, 2, 32, 40, "fp32"),),
    checked_prompts=(prefill.Shape(1, 1, 2, 32, 40, "fp16"),),
    timed_prompts=(prefill.Shape(1, 1, 1, 32, 20, "fp32"),),
    whole=(Whole(1, 24, 16, 3),),
    held=(Held(2, 16),),
    layers=2,
    settling=1,
    generated=4,
    variants=3,
    replays=4,
    repeats=3,
    copied=1 << 20,
    random_jobs=2,
    language_s=1e9,
)


@dataclass(frozen=True)
class Setting:
    """Where it runs, with which sizes and policies, and where results go.

    Attributes:
        device: `cuda`, or `cpu` in Triton's interpreter.
        names, raced: policies; the latter are those of the stage `in_place`.
    """

    device: str
    sizes: Sizes
    names: tuple[str, ...]
    raced: tuple[str, ...]
    out: Path

    @staticmethod
    def of(*, toy: bool, policies: str | None, out: Path | None) -> Setting | None:
        """What the options ask for; None without a GPU."""
        if not toy and not torch.cuda.is_available():
            return None
        device = "cpu" if toy else "cuda"
        gpu = "interpreter" if toy else torch.cuda.get_device_name().lower().replace(" ", "_")
        folder = out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else ROOT / "results" / gpu)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = POLICIES if policies is None else tuple(policies.split(","))
        raced = tuple(name for name in RACED if policies is None or name in wanted)
        return Setting(device, TOY if toy else REAL, _there(wanted), _there(raced), folder.resolve())

    @property
    def real(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"

    def missing(self) -> list[str]:
        """Policies without a package in generated/; the compiler, which makes them, may not be here."""
        return sorted({*POLICIES, *RACED} - {*self.names, *self.raced})

    def specs(self) -> list[PolicySpec]:
        """The policies."""
        return [cache_class(name).spec for name in self.names]

    def environment(self) -> dict[str, Any]:
        """The machine and the versions."""
        import triton

        gpu = torch.cuda.get_device_name() if self.real else "interpreter"
        facts = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        if HAS_TRANSFORMERS:
            import transformers

            facts["transformers"] = transformers.__version__
        return facts


def _there(names: Iterable[str]) -> tuple[str, ...]:
    """Those that have a package in generated/."""
    return tuple(name for name in names if (ROOT / "generated" / name / "cache.py").exists())


def cache_class(name: str) -> Any:
    """The class of a package in generated/."""
    module = importlib.import_module(f"generated.{name}.cache")
    return next(value for key, value in vars(module).items() if key.endswith("Cache") and hasattr(value, "spec"))


def module_of(stage: str) -> Any:
    """The module of a stage, whose `run(setting, lines)` gives an exit code."""
    return importlib.import_module(f"scripts.gpu.{stage}")


@dataclass
class Lines:
    """A file of JSON lines, each of which is there as soon as it is told."""

    path: Path
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.path.write_text("")

    def tell(self, **facts: Any) -> None:
        """One more line; `s` is when, in seconds since the stage began."""
        with self.path.open("a") as file:
            file.write(json.dumps({"s": round(time.monotonic() - self.begun, 1), **facts}) + "\n")


# -- states and calls --------------------------------------------------------------------------------------------------


def prepared(setting: Setting, spec: PolicySpec, shape: Shape, **params: float) -> tuple[Backend, SlotState, list[Token]]:
    """A backend and a full cache whose columns hold what attention gave them."""
    name = "triton" if spec.triton_source.exists() else "torch"
    backend = choose(spec, name, torch.device(setting.device), shape.torch_dtype)
    state = steady_state(spec, shape, device=setting.device, **params)
    tokens = new_tokens(shape, device=setting.device)
    step = decode_step(backend, state)
    for n in range(setting.sizes.settling):
        step(tokens[n % len(tokens)])
    return backend, state, tokens


def half(spec: PolicySpec, shape: Shape) -> dict[str, float]:
    """A policy that selects attends to half of what is live."""
    return {"tokens": float(shape.live // 2)} if spec.selects else {}


def clone_of(state: SlotState) -> SlotState:
    """The same cache with tensors of its own."""
    twin = deepcopy(state)
    twin.workspace = None
    return twin


def as_call(state: SlotState, token: Token) -> AttentionCall:
    """A token as the backend takes it."""
    query, key, value = token
    rope = rotation(key.shape[-1]) if state.spec.compact else None
    return AttentionCall(query, key, value, None, key.shape[-1] ** -0.5, rope=rope)


def on_device(setting: Setting, shape: prefill.Shape) -> Token:
    """A prompt's queries, keys and values."""
    query, key, value = (x.to(setting.device) for x in prefill.prompt(shape, seed=0))
    return query, key, value
