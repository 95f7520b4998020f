#!/usr/bin/env python
"""Train kvdsl's reference model: a small Llama on public-domain books, with retrieval tasks mixed in.

    prepare   corpus -> tokenizer.json, train.npy, heldout.npy (uint16 tokens) in the output folder
    pack      the same as one file of less than 64 MiB, for a machine that has no corpus
    train     runs for a budget of active minutes or of steps; checkpoints as it goes, and goes on from the last one
    export    the last checkpoint -> a Hugging Face folder (bf16 safetensors, tokenizer, model card, digests)

The model that ships was made by `train --preset cpu`, and then, from what `export` had made of that, by `train --preset cpu-long
--start FOLDER --seed 21` in another output folder, which lengthens what it uses of a text.

`lab/scripts/evaluate_reference_model.py` then measures the exported folder. Window length and learning rate are functions
of the share of the budget that is used up, so that the same recipe suits two cores, one large GPU, and a minute of CI.
A budget of minutes (the presets') makes the most of a machine; one of steps makes the same model on a machine of any speed.
"""

from __future__ import annotations

import io
import json
import platform
import re
import signal
import statistics
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "lab")]  # a checkout needs no installation for this

from reference_model_card import write_card  # noqa: E402

from kvdsl_lab.assets.retrieval import training_window  # noqa: E402

BOS, PAD = "<s>", "<pad>"
PACK_LIMIT = 64 * 2**20
console = Console(stderr=True)


# --------------------------------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Preset:
    """Everything that decides what is trained. Fractions are shares of the budget."""

    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    batch_tokens: int  # tokens of one optimiser step
    micro_tokens: int  # tokens of one forward pass: what fits into caches, or into memory
    minutes: float
    phases: tuple[tuple[float, int], ...]  # (from this fraction on, window length)
    device: str = "cpu"
    compile: bool = True
    head_dim: int = 64
    vocab: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay_from: float = 0.50
    shares: tuple[tuple[float, float], ...] = ((0.0, 0.80), (0.05, 0.20), (0.60, 0.35), (0.85, 0.20))  # of retrieval windows
    max_positions: int = 2048
    rope_theta: float = 10000.0

    def window(self, fraction: float) -> int:
        """Short windows first: they are cheap, and copying is learnt from near to far."""
        return [length for start, length in self.phases if start <= fraction][-1]

    def share(self, fraction: float) -> float:
        """The share of windows that hold a retrieval task.

        Copying is learnt all at once or not at all. Among books it took more than 1,600 steps and had not come; a
        stretch of short windows, most of them copying, brings it about in 150.
        """
        return [share for start, share in self.shares if start <= fraction][-1]

    def rate(self, fraction: float) -> float:
        """Warm-up, a constant rate, then straight to zero."""
        rise = min(1.0, fraction / self.warmup)
        fall = min(1.0, (1.0 - fraction) / (1.0 - self.decay_from))
        return self.learning_rate * max(0.0, min(rise, fall))


PHASES = ((0.0, 64), (0.05, 256), (0.68, 512), (0.75, 1024), (0.85, 2048))
CPU = Preset(5, 256, 512, 8, 4, 4096, 4096, 60.0, PHASES)
PRESETS = {
    "gpu": Preset(7, 384, 1024, 8, 4, 131072, 65536, 8.0, PHASES, device="cuda"),
    "cpu": CPU,
    # What such a model goes on with (`train --start`): nothing but long windows, at a gentler rate.
    "cpu-long": replace(
        CPU, minutes=40.0, phases=((0.0, 1024), (0.2, 2048)), learning_rate=1.5e-3, decay_from=0.1, shares=((0.0, 0.15),)
    ),
    "toy": Preset(2, 64, 128, 2, 1, 512, 512, 0.1, ((0.0, 128), (0.5, 192)), compile=False, head_dim=32, vocab=512),
}


# ------------------------------------------------------------------------------------------------ data


def books(corpus: Path) -> Iterator[str]:
    """The text of each book in an archive or folder of .txt files, in the order of the names."""
    if corpus.is_dir():
        for path in sorted(corpus.rglob("*.txt")):
            yield path.read_text(encoding="utf-8")
        return
    if not corpus.exists():
        raise click.ClickException(
            f"no corpus at {corpus}. Give an archive or a folder of .txt books: --corpus PATH "
            "(or --packed FILE, made by `pack` on a machine that has the corpus)."
        )
    with tarfile.open(corpus) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            if member.name.endswith(".txt") and (handle := archive.extractfile(member)):
                yield handle.read().decode("utf-8")


def train_tokenizer(texts: list[str], vocab: int) -> Any:
    """A byte-level BPE in which every digit is a token of its own, so that numbers can be copied digit by
    digit.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokens_of(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """The books as one row of tokens, encoded in pieces so that all cores share a long book."""
    pieces = [text[at : at + 50_000] for text in texts for at in range(0, len(text), 50_000)]
    rows = []
    for at in range(0, len(pieces), 256):  # the encodings of a whole corpus at once would take gigabytes
        batch = tokenizer.encode_batch_fast(pieces[at : at + 256], add_special_tokens=False)
        rows += [np.array(row.ids, dtype=np.uint16) for row in batch]
    return np.concatenate(rows)


def prepare_data(out: Path, corpus: Path, heldout: Path, vocab: int) -> None:
    """Tokenise once; later runs find the files. Of each held-out book, its start will do."""
    if all((out / name).exists() for name in ("tokenizer.json", "train.npy", "heldout.npy")):
        return
    train, held = list(books(corpus)), [text[:60_000] for text in books(heldout)]
    if not train or not held:
        raise click.ClickException(f"no .txt books in {corpus if not train else heldout}")
    out.mkdir(parents=True, exist_ok=True)
    sample = [text[:100_000] for text in train]  # the start of every book: a fifth of the corpus gives the same merges
    tokenizer = train_tokenizer(sample, vocab)
    tokenizer.save(str(out / "tokenizer.json"))
    np.save(out / "heldout.npy", tokens_of(tokenizer, held))
    np.save(out / "train.npy", tokens_of(tokenizer, train))


def unpack_data(packed: Path, out: Path) -> None:
    """The inverse of `pack`."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed) as archive:
        for name in ("tokenizer.json", "train.npy", "heldout.npy"):
            handle = archive.extractfile(name)
            if handle is None:
                raise click.ClickException(f"{packed} holds no {name}: make it again with `pack`")
            (out / name).write_bytes(handle.read())


class Windows:
    """Batches of windows. Batch number n is a function of the seed and n alone, so that a run can resume
    anywhere.
    """

    def __init__(self, out: Path, seed: int) -> None:
        from tokenizers import Tokenizer

        self.tokens = np.load(out / "train.npy", mmap_mode="r")
        self.tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
        self.bos = self.tokenizer.token_to_id(BOS)
        self.seed = seed
        self._piece = lru_cache(4096)(lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Text to ids, piece by piece: the tokenizer splits at digits first, and the other pieces recur."""
        return [token for piece in re.split(r"(\d)", text) if piece for token in self._piece(piece)]

    def batch(self, number: int, tokens: int, length: int, share: float) -> np.ndarray:
        """`tokens / length` windows, each of them BOS and a stretch of the corpus or a retrieval task."""
        if len(self.tokens) <= length:
            raise click.ClickException(f"the corpus has {len(self.tokens)} tokens; a window needs {length}")
        rng = np.random.default_rng([self.seed, number])
        rows = []
        for _ in range(max(1, tokens // length)):
            start = int(rng.integers(0, len(self.tokens) - length))
            stretch = self.tokens[start : start + length - 1].tolist()
            task = rng.random() < share
            row = training_window(rng, stretch, length, self.encode, self.bos) if task else [self.bos, *stretch]
            rows.append(row)
        return np.array(rows, dtype=np.int64)


# ----------------------------------------------------------------------------------------------- model


def causal_attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any) -> Any:
    """SDPA without a mask tensor: under torch.compile the usual path builds one, and loses the fast kernels
    by it.
    """
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    return sdpa(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2).contiguous(), None


def build_model(preset: Preset, vocab: int, seed: int) -> Any:
    """A fresh Llama of the preset's shape."""
    import torch
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("kvdsl_causal", causal_attention)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=preset.width,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.max_positions,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=1,
        attn_implementation="kvdsl_causal",
    )
    model = LlamaForCausalLM(config)
    return model.to(preset.device)


def loss_function(model: Any, preset: Preset) -> Callable[[Any], Any]:
    """Mean next-token loss of a batch, in bf16 autocast, compiled where the preset says so."""
    import torch
    from torch.nn.functional import cross_entropy

    def loss(ids: Any) -> Any:
        with torch.autocast(preset.device, torch.bfloat16):
            hidden = model.model(ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden)[:, :-1]
        return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    # Static shapes: there are only four window lengths, and each gets the kernels that suit it.
    return torch.compile(loss, dynamic=False) if preset.compile else loss


def optimiser(model: Any, preset: Preset) -> Any:
    """AdamW; matrices decay, norms do not."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": preset.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=preset.learning_rate, betas=(0.9, 0.95), fused=True)


# -------------------------------------------------------------------------------------------- training


class ActiveClock:
    """Seconds spent computing: a step counts three median steps at most, so that a suspended process does
    not age. With `pauses`, seconds on the wall, for a run that must end in time.
    """

    def __init__(self, seconds: float = 0.0, pauses: bool = False) -> None:
        self.seconds, self.pauses = seconds, pauses
        self._recent: deque[float] = deque(maxlen=50)

    def add(self, step: float) -> None:
        """Count one step."""
        if len(self._recent) >= 5 and not self.pauses:
            step = min(step, 3 * statistics.median(self._recent))
        self._recent.append(step)
        self.seconds += step

    def new_pace(self) -> None:
        """Forget the median: the next steps are of another kind (another window length, another
        compilation).
        """
        self._recent.clear()


class Trainer:
    """One run: its model, its clock, its curve, and the checkpoint that carries them across processes.

    Args:
        steps: the budget in steps of the optimiser; None: it is `minutes`.
    """

    def __init__(
        self, out: Path, preset: Preset, name: str, minutes: float, seed: int, pauses: bool = False, steps: int | None = None
    ) -> None:
        import torch

        self.out, self.preset, self.name, self.minutes, self.seed, self.steps = out, preset, name, minutes, seed, steps
        self.windows = Windows(out, seed)
        self.model = build_model(preset, self.windows.tokenizer.get_vocab_size(), seed)
        self.optimiser = optimiser(self.model, preset)
        self.loss = loss_function(self.model, preset)
        self.step, self.tokens, self.clock = 0, 0, ActiveClock(0.0, pauses)
        self.curve: list[dict[str, float]] = []
        self.before: dict[str, Any] | None = None  # training.json of the model this run started with, if not fresh
        self.stopped = False
        if (path := out / "checkpoint.pt").exists():
            self._restore(torch.load(path, map_location=preset.device, weights_only=True))

    def start_from(self, folder: Path) -> None:
        """Take the weights of an exported model, unless a checkpoint has been restored. The optimiser starts anew."""
        from safetensors.torch import load_file

        if self.step:
            return
        for name in ("model.safetensors", "tokenizer.json", "training.json"):
            if not (folder / name).exists():
                raise click.ClickException(f"{folder} holds no {name}: --start takes a folder that `export` has made")
        if (folder / "tokenizer.json").read_bytes() != (self.out / "tokenizer.json").read_bytes():
            raise click.ClickException(f"{folder} has another tokenizer than {self.out}: prepare the corpus of its training")
        weights = {"lm_head.weight": self.model.lm_head.weight, **load_file(folder / "model.safetensors")}
        shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise click.ClickException(f"{folder} holds a model of another shape than preset {self.name}'s")
        self.model.load_state_dict(weights)
        before = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        self.before = {key: value for key, value in before.items() if key != "evaluation"}

    def _restore(self, state: dict[str, Any]) -> None:
        if state["preset"] != json.loads(json.dumps(asdict(self.preset))):
            raise click.ClickException(f"{self.out} holds a checkpoint of another preset: use another --out")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens, self.curve, self.before = (state[key] for key in ("step", "tokens", "curve", "before"))
        self.clock = ActiveClock(state["seconds"], self.clock.pauses)
        console.print(f"going on from step {self.step}, {self.clock.seconds / 60:.1f} active minutes")

    def save(self) -> None:
        """Write beside the checkpoint and rename: a run that is killed leaves the old one whole."""
        import torch

        state = {
            "preset": json.loads(json.dumps(asdict(self.preset))),
            "name": self.name,
            "seed": self.seed,
            "minutes": self.minutes,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.clock.seconds,
            "curve": self.curve,
            "before": self.before,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    @property
    def fraction(self) -> float:
        """The share of the budget that is used up."""
        return min(1.0, self.spent / (self.steps or 60 * self.minutes))

    @property
    def spent(self) -> float:
        """Steps or active seconds: what the budget is counted in."""
        return self.clock.seconds if self.steps is None else self.step

    def _one_step(self, length: int) -> float:
        import torch

        preset = self.preset
        batch = torch.from_numpy(self.windows.batch(self.step, preset.batch_tokens, length, preset.share(self.fraction))).to(
            preset.device
        )
        parts = batch.split(max(1, preset.micro_tokens // length))
        for group in self.optimiser.param_groups:
            group["lr"] = preset.rate(self.fraction)
        total = torch.zeros((), device=preset.device)
        for part in parts:
            loss = self.loss(part) * (len(part) / len(batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.numel()
        return float(total)

    def heldout_loss(self, length: int, most: int = 28) -> float:
        """Mean loss over windows of `length` tokens taken evenly from books of authors outside the training
        corpus.
        """
        import torch

        tokens = np.load(self.out / "heldout.npy", mmap_mode="r")
        if len(tokens) < length:
            raise click.ClickException(f"the held-out text has {len(tokens)} tokens; a window needs {length}")
        count = min(most, len(tokens) // length)
        starts = np.linspace(0, len(tokens) - length + 1, count).astype(int)
        rows = [[self.windows.bos, *tokens[s : s + length - 1].tolist()] for s in starts]
        ids = torch.tensor(rows, device=self.preset.device)
        eager = loss_function(self.model, Preset(**{**asdict(self.preset), "compile": False}))
        with torch.no_grad():
            return statistics.fmean(float(eager(row)) for row in ids.split(1))

    def note(self, losses: list[float], length: int) -> None:
        """One point of the loss curve."""
        point = {
            "step": self.step,
            "tokens": self.tokens,
            "minutes": round(self.clock.seconds / 60, 2),
            "window": length,
            "train": round(statistics.fmean(losses), 4),
            "heldout": round(self.heldout_loss(min(length, 512)), 4),
        }
        self.curve.append(point)
        if not console.is_terminal:
            print(json.dumps(point), flush=True)

    def run(self, checkpoint_every: float, note_every: float) -> None:
        """Step until the budget is used up or somebody asks to stop.

        Args:
            checkpoint_every, note_every: in what the budget is counted in.
        """
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", True))
        losses: list[float] = []
        length, saved, noted, now = 0, self.spent, self.spent, time.monotonic()
        with progress_bar() as advance:
            while self.fraction < 1.0 and not self.stopped:
                if length != (length := self.preset.window(self.fraction)):
                    self.clock.new_pace()
                losses.append(self._one_step(length))
                began, now = now, time.monotonic()
                self.clock.add(now - began)
                advance(self.fraction, f"window {length}, step {self.step}, loss {losses[-1]:.2f}")
                if self.spent - noted >= note_every or self.fraction >= 1.0:
                    self.note(losses, length)
                    losses, noted = [], self.spent
                if self.spent - saved >= checkpoint_every:
                    self.save()
                    saved = self.spent
        self.save()


def progress_bar() -> Any:
    """A context that yields advance(fraction, text): a bar on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        return nullcontext(lambda fraction, text: None)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.description}"), TimeRemainingColumn())
    return _Bar(Progress(*columns, console=console))


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=1.0)

    def __enter__(self) -> Callable[[float, str], None]:
        self._progress.start()
        return lambda fraction, text: self._progress.update(self._task, completed=fraction, description=text)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


# ---------------------------------------------------------------------------------------------- export


def hf_config(preset: Preset, vocab: int) -> dict[str, Any]:
    """config.json by hand: it says rope base and dtype in the words of transformers 4 and of 5."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": preset.width,
        "intermediate_size": preset.intermediate,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": preset.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": preset.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": preset.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
        "use_cache": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def describe(trainer: Trainer, remark: str) -> dict[str, Any]:
    """What training.json says: how the weights came about, and what they reach."""
    import torch
    import transformers

    lengths = sorted({length for _, length in trainer.preset.phases} & {512, 1024, 2048}) or [trainer.preset.phases[-1][1]]
    stride = max(1, len(trainer.curve) // 100)
    cores = f"{torch.get_num_threads()} CPU cores" if trainer.preset.device == "cpu" else torch.cuda.get_device_name()
    return {
        "name": trainer.name,
        "remark": remark,
        "seed": trainer.seed,
        "preset": asdict(trainer.preset),
        "fraction": round(trainer.fraction, 4),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "corpus_tokens": len(trainer.windows.tokens),
        "tokens": trainer.tokens,
        "steps": trainer.step,
        "active_minutes": round(trainer.clock.seconds / 60, 1),
        "machine": cores,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "heldout_loss": {str(length): round(trainer.heldout_loss(length), 4) for length in lengths},
        "curve": trainer.curve[::-stride][::-1],
        "before": trainer.before,
    }


def export_model(trainer: Trainer, folder: Path, remark: str = "") -> None:
    """The Hugging Face folder. The weights are rounded to bf16 first, so that the figures are those of what
    ships.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).clone().contiguous()
        for name, tensor in trainer.model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embeddings
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    trainer.model.to(torch.bfloat16).to(torch.float32)
    (folder / "tokenizer.json").write_bytes((trainer.out / "tokenizer.json").read_bytes())
    special = {"bos_token": BOS, "pad_token": PAD}
    files = {
        "config.json": hf_config(trainer.preset, trainer.windows.tokenizer.get_vocab_size()),
        "tokenizer_config.json": {
            **special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": trainer.preset.max_positions,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "special_tokens_map.json": special,
        "generation_config.json": {"bos_token_id": 0, "pad_token_id": 1},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_card(folder, describe(trainer, remark))


# -------------------------------------------------------------------------------------------- commands

out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=REPO / "build/reference_model",
    show_default="build/reference_model",
    help="Folder for tokens and checkpoints.",
)
corpus_option = click.option(
    "--corpus",
    type=click.Path(path_type=Path),
    default=REPO.parent / "shared/corpus/train.tar.xz",
    show_default="../shared/corpus/train.tar.xz",
    help="Archive or folder of .txt books.",
)
heldout_option = click.option(
    "--heldout",
    type=click.Path(path_type=Path),
    default=REPO.parent / "shared/corpus/dev.tar.xz",
    show_default="../shared/corpus/dev.tar.xz",
    help="Books to measure the loss on; never trained on.",
)
preset_option = click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="cpu",
    show_default=True,
    help="gpu: 14 M parameters. cpu: 5 M, about an hour on 2 cores. cpu-long: what goes on from it (--start), 40 minutes. "
    "toy: seconds, for tests.",
)


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    import torch

    torch.set_float32_matmul_precision("high")


@main.command()
@out_option
@corpus_option
@heldout_option
@preset_option
def prepare(out: Path, corpus: Path, heldout: Path, preset: str) -> None:
    """Train the tokenizer and tokenise the corpus (two minutes; `train` does it too, when it has not been
    done).
    """
    prepare_data(out, corpus, heldout, PRESETS[preset].vocab)


@main.command()
@out_option
@click.argument("packed", type=click.Path(path_type=Path, dir_okay=False))
def pack(out: Path, packed: Path) -> None:
    """Write what `prepare` made as one file PACKED, for a machine that has no corpus."""
    names = ("tokenizer.json", "train.npy", "heldout.npy")
    if missing := [name for name in names if not (out / name).exists()]:
        raise click.ClickException(f"{out} has no {', '.join(missing)}: run `prepare` first")
    with tarfile.open(packed, "w:xz", preset=6) as archive:
        for name in names:
            data = (out / name).read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    size = packed.stat().st_size
    click.echo(f"{packed}: {size / 2**20:.1f} MiB")
    if size > PACK_LIMIT:
        raise click.ClickException("larger than 64 MiB: prepare from fewer books")


@main.command()
@out_option
@corpus_option
@heldout_option
@preset_option
@click.option(
    "--packed",
    type=click.Path(path_type=Path, exists=True),
    help="A file made by `pack`, instead of a corpus.",
)
@click.option(
    "--start",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Go on from the weights of this exported model instead of fresh ones.",
)
@click.option("--minutes", type=float, help="Budget of active minutes over all runs [default: the preset's].")
@click.option(
    "--steps", type=click.IntRange(1), help="A budget of steps instead, so that no model depends on a machine's speed."
)
@click.option("--seed", type=int, default=20, show_default=True)
@click.option("--threads", type=int, help="CPU threads [default: all].")
@click.option(
    "--checkpoint-every",
    type=float,
    default=180.0,
    show_default=True,
    help="Active seconds between checkpoints; steps with --steps.",
)
@click.option(
    "--note-every",
    type=float,
    default=60.0,
    show_default=True,
    help="Active seconds between points of the curve; steps with --steps.",
)
@click.option("--count-pauses", is_flag=True, help="Let the budget run while the process is suspended, too.")
def train(
    out: Path,
    corpus: Path,
    heldout: Path,
    preset: str,
    packed: Path | None,
    start: Path | None,
    minutes: float | None,
    steps: int | None,
    seed: int,
    threads: int | None,
    checkpoint_every: float,
    note_every: float,
    count_pauses: bool,
) -> None:
    """Train until the budget is used up. Stopped (Ctrl-C loses minutes, SIGTERM nothing), the same command
    goes on.
    """
    import torch

    if minutes is not None and steps is not None:
        raise click.UsageError("give --minutes or --steps, not both")
    if threads:
        torch.set_num_threads(threads)
    shape = PRESETS[preset]
    if shape.device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("the gpu preset needs a CUDA device; here, use --preset cpu")
    if packed and not (out / "train.npy").exists():
        unpack_data(packed, out)
    prepare_data(out, corpus, heldout, shape.vocab)
    trainer = Trainer(out, shape, preset, minutes or shape.minutes, seed, count_pauses, steps)
    if start:
        trainer.start_from(start)
    parameters = sum(p.numel() for p in trainer.model.parameters()) / 1e6
    text = len(trainer.windows.tokens) / 1e6
    console.print(f"preset {preset}: {parameters:.2f} M parameters, {text:.1f} M tokens of text")
    trainer.run(checkpoint_every, note_every)
    spent = trainer.clock.seconds / 60
    console.print(f"{trainer.tokens / 1e6:.1f} M tokens in {spent:.1f} active minutes; next: `export`")


@main.command()
@out_option
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--remark", default="", help="What else training.json and the model card shall say.")
def export(out: Path, folder: Path, remark: str) -> None:
    """Write the last checkpoint as a Hugging Face folder FOLDER (also in mid-training: the card then says
    so).
    """
    import torch

    if not (out / "checkpoint.pt").exists():
        raise click.ClickException(f"{out} holds no checkpoint: run `train` first")
    state = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
    trainer = Trainer(out, PRESETS[state["name"]], state["name"], state["minutes"], state["seed"], steps=state.get("steps"))
    export_model(trainer, folder, remark)
    click.echo(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 2**20:.1f} MiB of weights")


if __name__ == "__main__":
    main()
