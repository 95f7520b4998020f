"""What lies beside the reference model's weights and says what they are: training.json, card, digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from textwrap import fill
from typing import Any

CARD = """\
---
language: en
license: apache-2.0
pipeline_tag: text-generation
---

# kvdsl reference model

A causal language model of {parameters:.2f} million parameters that comes with kvdsl, so that a cache
policy can be tried before anything has been downloaded. It is a measuring instrument, not a chat model:
it writes old-fashioned prose that makes little sense. Made by `lab/scripts/train_reference_model.py` ({presets}); every
figure below is also in `training.json`.

## Data

- 306 books published up to 1922, in the public domain, from a public collection of classics
  (mlschmitt/classic-books-markdown): 150 million characters, {corpus_tokens:.1f} million tokens. No
  author stands both in these and in the 14 books it is evaluated on.
- Some training windows hold a retrieval task made by `lab/kvdsl_lab/assets/retrieval.py`. Windows of less than 96 tokens
  repeat a string of unrelated tokens. In longer ones the task is a pass-key of five different digits, hidden in book
  text and asked for at the end (35 %); up to 16 named numbers of four digits, asked for in another order (35 %); a
  repeated string (15 %); a passage of a book that recurs (15 %). The loss is taken on all tokens.

## Model

Llama architecture: {layers} layers, {width} wide, MLP {intermediate}, {heads} query heads on {kv_heads}
key/value heads of {head_dim}, rotary positions (theta {rope_theta:.0f}), tied embeddings, {max_positions}
positions. Byte-level BPE of {vocab:,} entries, every digit a token of its own; `<s>` at the start of
every window, which the tokenizer adds. No end-of-text token. Weights in bfloat16.

## Training
"""

STAGE = """\
{begins}{tokens:.1f} million tokens in {steps} steps and {minutes:.0f} minutes of computing ({machine}; torch {torch},
transformers {transformers}; seed {seed}). AdamW (betas 0.9 and 0.95, weight decay {weight_decay}, clipping at 1),
{batch_tokens:,} tokens a step, learning rate {learning_rate} after a warm-up, falling to 0 from {decay_from:.0%} of the time on.
Window length by share of the time: {phases}. Windows with a retrieval task: {shares}.
Loss on held-out authors (mean over windows of {lengths} tokens): {heldout}.
"""

MEASURED = """
## Measured, full cache

`lab/scripts/evaluate_reference_model.py`, on the 14 evaluation books{note}.

Perplexity of the same {scored:,} tokens, predicted with

| context up to | {contexts} |
|---|{rule}|
| perplexity | {ppl} |

The loss falls by {gains} (mean over {windows} windows, ± standard error).

Answers wholly right, by depth of the fact in the text ({trials} trials each, greedy):

| task | tokens | {depths} | all |
|---|---|{depth_rule}|---|
{recall}

Chance is 1 in 30,240 for the pass-key. Of the key-values, one of {pairs} is asked for; naming any of the
{pairs} at random would get {guess:.0%}.

Attention that the first 4 tokens get (mean over heads, books, and queries from token 64 on, {sink_length}
tokens; in brackets the first token alone):

| layer | {layers} |
|---|{layer_rule}|
| share | {sinks} |

Perplexity when every query sees a limited number of slots ({limited_length} tokens, last {limited_scored}
scored), with the latest tokens only (`window`) and with the first 4 and the latest (`sinks + window`):

| slots | {budgets} | all |
|---|{budget_rule}|---|
| window | {window} | {full} |
| sinks + window | {streaming} | {full} |
"""

LIMITS = """
## Limits

English of the nineteenth century and its prejudices, uncorrected. Far too small for facts, instructions
or reasoning. Trained on positions up to 2,048 only. Retrieval works in the words of
`lab/kvdsl_lab/assets/retrieval.py` and should not be expected in others. Figures about cache policies obtained
with it say how policies compare on a small model; they do not carry over to large ones unchecked.
"""


def render_card(training: dict[str, Any]) -> str:
    """The model card, from training.json alone."""
    stages = _stages(training)
    shape = {key: training["preset"][key] for key in _SHAPE}
    card = CARD.format(
        **shape,
        presets=", then ".join(f"preset `{stage['name']}`" for stage in stages),
        parameters=training["parameters"] / 1e6,
        corpus_tokens=training["corpus_tokens"] / 1e6,
    )
    card += "".join(map(_stage, stages))
    return card + (_measured(training["evaluation"]) if "evaluation" in training else "") + LIMITS


_SHAPE = ("layers", "width", "intermediate", "heads", "kv_heads", "head_dim", "rope_theta", "max_positions", "vocab")


def _stages(training: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs by which the weights came about, the first one first."""
    before = training.get("before")
    return [*(_stages(before) if before else ()), training]


def _stage(training: dict[str, Any]) -> str:
    preset = training["preset"]
    stage = STAGE.format(
        **training["versions"],
        begins="Going on from these weights with a new optimiser, preset `{name}`: ".format(**training)
        if training.get("before")
        else "",
        tokens=training["tokens"] / 1e6,
        steps=f"{training['steps']:,}",
        minutes=training["active_minutes"],
        machine=training["machine"],
        seed=training["seed"],
        weight_decay=preset["weight_decay"],
        batch_tokens=preset["batch_tokens"],
        learning_rate=preset["learning_rate"],
        decay_from=preset["decay_from"],
        phases=", ".join(f"{length:,} from {start:.0%}" for start, length in preset["phases"]),
        shares=", ".join(f"{share:.0%} from {start:.0%}" for start, share in preset["shares"]),
        lengths=" / ".join(f"{int(length):,}" for length in training["heldout_loss"]),
        heldout=" / ".join(f"{loss:.3f}" for loss in training["heldout_loss"].values()),
    )
    stage = f"\n{fill(stage, 110)}\n"
    if training["remark"]:
        stage += f"\n{training['remark']}\n"
    if training["fraction"] < 1:
        stage += f"\n**Preliminary: exported after {training['fraction']:.0%} of the training.**\n"
    return stage


def _measured(result: dict[str, Any]) -> str:
    ppl, recall, sinks, limited = (result[key] for key in ("perplexity", "recall", "sinks", "limited"))
    gains = "; ".join(
        f"{gain['mean']:.4f} ± {gain['error']:.4f} nats from {gain['from']:,} to {gain['to']:,}" for gain in ppl["gains"]
    )
    rows = [
        f"| {row['task']} | {row['length']:,} | "
        + " | ".join(f"{x:.0%}" for x in row["by_depth"])
        + f" | {row['all']:.1%} |"
        for row in recall["rows"]
    ]
    return MEASURED.format(
        note=result["note"],
        scored=ppl["scored"],
        windows=ppl["windows"],
        gains=gains,
        contexts=_cells(f"{c:,}" for c in map(int, ppl["by_context"])),
        rule="|".join(["---"] * len(ppl["by_context"])),
        ppl=_cells(f"{p:.2f}" for p in ppl["by_context"].values()),
        trials=recall["trials"],
        depths=_cells(f"{d:.0%}" for d in recall["depths"]),
        depth_rule="|".join(["---"] * len(recall["depths"])),
        recall="\n".join(rows),
        pairs=recall["pairs"],
        guess=1 / recall["pairs"],
        sink_length=sinks["length"],
        layers=_cells(range(len(sinks["first_4"]))),
        layer_rule="|".join(["---"] * len(sinks["first_4"])),
        sinks=_cells(f"{four:.0%} ({one:.0%})" for four, one in zip(sinks["first_4"], sinks["first_1"], strict=True)),
        limited_length=f"{limited['length']:,}",
        limited_scored=f"{limited['scored']:,}",
        budgets=_cells(limited["budgets"]),
        budget_rule="|".join(["---"] * len(limited["budgets"])),
        full=f"{limited['full']:.1f}",
        window=_cells(f"{x:.1f}" for x in limited["window"]),
        streaming=_cells(f"{x:.1f}" for x in limited["streaming"]),
    )


def _cells(values: Any) -> str:
    return " | ".join(map(str, values))


def write_card(folder: Path, training: dict[str, Any]) -> None:
    """training.json and README.md, then digest.json over the files that decide what the model computes."""
    (folder / "training.json").write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(render_card(training), encoding="utf-8")
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    (folder / "digest.json").write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")
