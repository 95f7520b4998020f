"""What all experiments share: sizes, policies, the folder of the results and the lines in it, states and calls."""

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

POLICIES = ("h2o", "roco", "streaming_llm", "sparcas", "equip_blocks", "full", "tova", "scissorhands")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Llama-3-8B's shape, as a `config.json`."""


@dataclass(frozen=True)
class Served:
    """What vLLM is asked: so many requests of prompts and answers of so many tokens."""

    config: dict[str, Any]
    requests: int
    prompt: int
    answer: int
    budget: int
    cache_bytes: int


@dataclass(frozen=True)
class Sizes:
    """Of everything that is run."""

    timed: tuple[Shape, ...]
    parts: tuple[Shape, ...]
    together: tuple[Shape, ...]
    selecting: tuple[Shape, ...]
    checked: tuple[Shape, ...]
    checked_prompts: tuple[prefill.Shape, ...]
    timed_prompts: tuple[prefill.Shape, ...]
    served: Served
    layers: int
    settling: int
    generated: int
    cuts: int
    replays: int
    repeats: int
    random_jobs: int
    language_s: float


REAL = Sizes(
    checked=tuple(
        Shape(batch, 4, group, dim, live, dtype)
        for dtype in ("fp32", "fp16", "bf16")
        for batch, group, dim, live in ((1, 4, 128, 1000), (3, 1, 64, 257), (2, 7, 80, 4097), (1, 8, 256, 600))
    ),
    timed=tuple(Shape(batch, 8, 4, 128, live, "bf16") for batch, live in product((64, 128, 256), (1024, 2048))),
    parts=tuple(Shape(batch, 8, 4, 128, 4096, "bf16") for batch in (64, 8, 1)),
    together=tuple(Shape(batch, 8, 4, 128, live, "bf16") for batch, live in ((1, 4096), (8, 1024))),
    selecting=tuple(Shape(batch, 8, 4, 128, 32768, "bf16") for batch in (8, 1)),
    checked_prompts=(  # every one of them is compiled for every policy
        prefill.Shape(1, 2, 4, 128, 2000, "bf16"),
        prefill.Shape(1, 2, 7, 80, 1025, "bf16"),
        prefill.Shape(1, 2, 8, 256, 600, "bf16"),
        prefill.Shape(2, 2, 1, 64, 777, "fp16"),
        prefill.Shape(1, 2, 4, 128, 1000, "fp32"),
    ),
    timed_prompts=tuple(prefill.Shape(1, 8, 4, 128, length, "bf16") for length in (2048, 32768)),
    served=Served(LLAMA, 64, 512, 2048, 512, 4 << 30),
    layers=32,
    settling=SETTLING,
    generated=24,
    cuts=99,
    replays=500,
    repeats=15,
    random_jobs=2000,
    language_s=45,
)
TOY = Sizes(
    timed=(Shape(1, 1, 2, 32, 20, "fp32"),),
    parts=(Shape(1, 1, 2, 32, 20, "fp32"),),
    together=(Shape(1, 1, 2, 32, 20, "fp32"),),
    selecting=(Shape(1, 1, 2, 32, 40, "fp32"),),
    checked=(Shape(2, 1, 2, 32, 20, "fp16"),),
    checked_prompts=(prefill.Shape(1, 1, 2, 32, 40, "fp16"),),
    timed_prompts=(prefill.Shape(1, 1, 1, 32, 20, "fp32"),),
    served=Served(
        LLAMA | {
            "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 64,
        },
        2, 24, 8, 16, 64 << 20,
    ),
    layers=2,
    settling=1,
    generated=4,
    cuts=3,
    replays=4,
    repeats=3,
    random_jobs=2,
    language_s=1e9,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Where it runs, with which sizes and policies, and where results go.

    Attributes:
        device: `cuda`, or `cpu` in Triton's interpreter.
        names: policies. out: the folder of the results.
    """

    device: str
    sizes: Sizes
    names: tuple[str, ...]
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
        return Setting(device, TOY if toy else REAL, _there(wanted), folder.resolve())

    @property
    def real(self) -> bool:
        """Whether there is a GPU."""
        return self.device == "cuda"

    def missing(self) -> list[str]:
        """Policies without a package in generated/; the compiler, which makes them, may not be here."""
        return sorted({*POLICIES} - {*self.names})

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


@dataclass
class Lines:
    """A file of JSON lines, each of which is there as soon as it is told."""

    path: Path
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.path.write_text("")

    def tell(self, **facts: Any) -> None:
        """One more line; `s` is when, in seconds since the experiment began."""
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
