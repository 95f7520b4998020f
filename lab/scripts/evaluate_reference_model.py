#!/usr/bin/env python
"""Measure an exported reference model and write the figures into its training.json and model card.

Perplexity of the same tokens under different context lengths; pass-key and key-value recall by depth; the
share of attention that the first tokens get, by layer; and what is lost when every query sees few slots,
with and without the first tokens.
"""

from __future__ import annotations

import json
import math
import statistics
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
from reference_model_card import write_card
from rich.console import Console
from rich.progress import track
from train_reference_model import REPO, books

from kvdsl_lab.assets import load_reference_model, reference_model_path
from kvdsl_lab.assets.retrieval import Recall, key_values, lay_out, pass_key

console = Console(stderr=True)
CONTEXTS = (512, 1024, 2048)
SCORED = 256  # tokens scored at the end of each window
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = 8
BUDGETS = (16, 32, 64, 128, 256)


class Measure:
    """A model, its tokenizer, and the evaluation text as tokens, one array for each book."""

    def __init__(self, folder: Path, texts: list[str], seed: int) -> None:
        self.model, self.tokenizer = load_reference_model(folder=folder)
        self.rows = [np.array(self.encode(text)) for text in texts]
        self.rng = np.random.default_rng(seed)
        self._encoded = lru_cache(4096)(self.encode)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def windows(self, length: int, count: int) -> list[list[int]]:
        """`count` stretches of `length` - 1 tokens, the same number from each book, evenly over the book,
        after BOS.
        """
        out = []
        for row in self.rows:
            if len(row) <= length:
                raise click.ClickException(f"an evaluation book has {len(row)} tokens; {length} are needed")
            starts = np.linspace(0, len(row) - length, max(1, count // len(self.rows))).astype(int)
            out += [[self.tokenizer.bos_token_id, *row[s : s + length - 1].tolist()] for s in starts]
        return out

    def losses(self, rows: list[list[int]], mask: Any = None) -> np.ndarray:
        """Loss of each of the last SCORED tokens, one row for each window."""
        import torch

        out = []
        for row in rows:
            ids = torch.tensor([row])
            with torch.no_grad():
                hidden = self.model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
                logits = self.model.lm_head(hidden[0, -SCORED - 1 : -1])
            out.append(torch.nn.functional.cross_entropy(logits, ids[0, -SCORED:], reduction="none").numpy())
        return np.stack(out)

    def perplexity(self, count: int) -> dict[str, Any]:
        """The last SCORED tokens of long windows, predicted with less and with more of what stands before
        them.
        """
        rows = self.windows(max(CONTEXTS), count)
        bos = self.tokenizer.bos_token_id
        losses = {
            context: self.losses([[bos, *row[1 - context :]] for row in track_(rows, f"context {context}")]).mean(axis=1)
            for context in CONTEXTS
        }
        gains = []
        for less, more in pairwise(CONTEXTS):
            gain = losses[less] - losses[more]
            error = float(gain.std(ddof=1) / math.sqrt(len(gain))) if len(gain) > 1 else 0.0
            gains.append({"from": less, "to": more, "mean": round(float(gain.mean()), 5), "error": round(error, 5)})
        by_context = {str(context): round(math.exp(loss.mean()), 3) for context, loss in losses.items()}
        return {"by_context": by_context, "gains": gains, "windows": len(rows), "scored": len(rows) * SCORED}

    def recalls(self, task: Recall, length: int) -> bool:
        """Whether greedy decoding gives the answer: each digit must be the likeliest, given the digits
        before it.
        """
        import torch

        row = self.rows[int(self.rng.integers(len(self.rows)))]
        start = int(self.rng.integers(0, len(row) - length))
        answer = self._encoded(task.questions[-1][1])
        prompt = lay_out(
            task,
            row[start : start + length].tolist(),
            length - len(answer),
            self._encoded,
            self.tokenizer.bos_token_id,
            answered=False,
        )
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            hidden = self.model.model(ids, use_cache=False).last_hidden_state
            guess = self.model.lm_head(hidden[0, -len(answer) - 1 : -1]).argmax(-1)
        return guess.tolist() == list(answer)

    def recall(self, lengths: tuple[int, ...], trials: int) -> dict[str, Any]:
        """Share of right answers by task, length and depth."""
        rows = []
        for name in ("pass-key", "key-value"):
            for length in lengths:
                shares = []
                for depth in track_(DEPTHS, f"{name}, {length} tokens"):
                    right = [self.recalls(self._task(name, depth), length) for _ in range(trials)]
                    shares.append(statistics.fmean(right))
                rows.append(
                    {
                        "task": name,
                        "length": length,
                        "by_depth": shares,
                        "all": round(statistics.fmean(shares), 4),
                    }
                )
        return {"depths": DEPTHS, "trials": trials, "pairs": PAIRS, "rows": rows}

    def _task(self, name: str, depth: float) -> Recall:
        if name == "pass-key":
            return pass_key(self.rng, depth)
        task = key_values(self.rng, PAIRS, asked=1)
        subject = task.questions[0][0].strip()
        facts = tuple((depth if subject in text else at, text) for at, text in task.facts)
        return Recall(facts, task.questions)

    def sinks(self, length: int, count: int) -> dict[str, Any]:
        """Share of attention on the first 4 tokens and on the first alone, by layer, over queries from token
        64 on.
        """
        import torch

        self.model.set_attn_implementation("eager")
        shares = []
        for row in track_(self.windows(length, count), "attention sinks"):
            with torch.no_grad():
                attention = self.model(torch.tensor([row]), output_attentions=True, use_cache=False).attentions
            late = torch.stack(attention)[:, 0, :, 64:]  # layer, head, query, key
            shares.append(torch.stack([late[..., :4].sum(-1).mean((1, 2)), late[..., 0].mean((1, 2))]))
        self.model.set_attn_implementation("sdpa")
        four, one = torch.stack(shares).mean(0)
        listed = [[round(x, 4) for x in row.tolist()] for row in (four, one)]
        return {"length": length, "windows": len(shares), "first_4": listed[0], "first_1": listed[1]}

    def limited(self, length: int, count: int) -> dict[str, Any]:
        """Perplexity when a query sees `budget` slots: the latest ones, or the first 4 and the latest."""
        rows = self.windows(length, count)

        def ppl(budget: int, sinks: int) -> float:
            return round(math.exp(self.losses(rows, slots_mask(length, budget, sinks)).mean()), 2)

        pairs = [(ppl(budget, 0), ppl(budget, 4)) for budget in track_(BUDGETS, "limited slots")]
        return {
            "length": length,
            "scored": len(rows) * SCORED,
            "budgets": BUDGETS,
            "full": ppl(length, 0),
            "window": [window for window, _ in pairs],
            "streaming": [streaming for _, streaming in pairs],
        }


def slots_mask(length: int, budget: int, sinks: int) -> Any:
    """An additive causal mask under which each query sees the first `sinks` tokens and the latest `budget -
    sinks`.
    """
    import torch

    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = (key <= query) & ((key < sinks) | (key > query - (budget - sinks)))
    return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def track_(values: Any, text: str) -> Any:
    """A progress bar on a terminal only."""
    return track(list(values), text, console=console, disable=not console.is_terminal, transient=True)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path, exists=True),
    default=reference_model_path(),
    show_default="the shipped model",
    help="An exported folder.",
)
@click.option(
    "--books",
    "texts",
    type=click.Path(path_type=Path),
    default=REPO.parent / "shared/corpus/dev.tar.xz",
    show_default="../shared/corpus/dev.tar.xz",
    help="Archive or folder of .txt books.",
)
@click.option("--windows", type=int, default=112, show_default=True, help="Windows to measure perplexity on.")
@click.option("--trials", type=int, default=20, show_default=True, help="Trials for each recall task, length and depth.")
@click.option("--threads", type=int, help="CPU threads [default: all].")
@click.option("--seed", type=int, default=7, show_default=True)
@click.option("--note", default="", help="A remark for the model card.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures, and leave the folder alone.")
def main(
    folder: Path,
    texts: Path,
    windows: int,
    trials: int,
    threads: int | None,
    seed: int,
    note: str,
    as_json: bool,
) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)
    measure = Measure(folder, list(books(texts)), seed)
    few = max(1, windows // 6)
    result = {
        "note": note,
        "seed": seed,
        "perplexity": measure.perplexity(windows),
        "recall": measure.recall((256, 512, 1024), trials),
        "sinks": measure.sinks(512, few),
        "limited": measure.limited(1024, few),
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    write_card(folder, {**training, "evaluation": result})
    click.echo(f"{folder}: training.json and README.md now hold the figures")


if __name__ == "__main__":
    main()
