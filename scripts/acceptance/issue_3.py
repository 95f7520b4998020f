"""The embedded reference model and its text."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from acceptance.registry import Measured, NotMeasured, at_least, criterion, kvdsl_json

CHANCE = 1e-4
"""Of guessing five different digits: 1 in 30,240, rounded up."""


@lru_cache
def _training() -> dict[str, Any]:
    from kvdsl_lab.assets import reference_model_path

    found: dict[str, Any] = json.loads((reference_model_path() / "training.json").read_text(encoding="utf-8"))
    return found


def _evaluation() -> dict[str, Any]:
    found: dict[str, Any] | None = _training().get("evaluation")
    if found is None:
        raise NotMeasured("training.json holds no evaluation yet: run lab/scripts/evaluate_reference_model.py")
    return found


@criterion(3, "perplexity of dev books with the full cache at contexts 512, 1024, 2048")
def _contexts() -> Measured:
    by_context = _evaluation()["perplexity"]["by_context"]
    values = [by_context[str(context)] for context in (512, 1024, 2048)]
    return " > ".join(f"{value:.2f}" for value in values), "falls", values[0] > values[1] > values[2]


@criterion(3, "pass-key recall at 1,024 tokens with the full cache (training.json)")
def _passkey() -> Measured:
    rows = _evaluation()["recall"]["rows"]
    share = next(row["all"] for row in rows if row["task"] == "pass-key" and row["length"] == 1024)
    gpu = str(_training()["name"]).startswith("gpu")
    bound = 0.8 if gpu else 100 * CHANCE
    return f"{share:.1%}", f">= {bound:.0%} (preset {_training()['name']})", share >= bound


@criterion(3, "attention that the first 4 tokens get, by layer")
def _sinks() -> Measured:
    found = _evaluation()["sinks"]
    shares, even = found["first_4"], 4 / found["length"] * 2
    listed = ", ".join(f"{share:.0%}" for share in shares)
    return listed, f"some layer above 10 times an even share ({10 * even:.0%})", max(shares) > 10 * even


@lru_cache
def _perplexities() -> dict[tuple[str, float | None], float]:
    rows = kvdsl_json(
        "eval", "ppl", "--policies", "full,window,streaming_llm,h2o,roco", "--budgets", "32,128", "--tokens", "512"
    )["rows"]
    return {(row["policy"], row["budget"]): row["ppl"] for row in rows}


def _window_loses(budget: int) -> None:
    @criterion(3, f"perplexity of window over streaming_llm, token by token, budget {budget}")
    def _() -> Measured:
        found = _perplexities()
        value, bound, ok = at_least(round(found["window", budget] / found["streaming_llm", budget], 3), 1.05)
        return f"{value} ({found['window', budget]:.2f} / {found['streaming_llm', budget]:.2f})", bound, ok


for _budget in (32, 128):
    _window_loses(_budget)


@criterion(3, "perplexity of RoCo and H2O at 32, and of the full cache (reported)")
def _attention_policies() -> Measured:
    found = _perplexities()
    text = f"RoCo {found['roco', 32]:.2f}, H2O {found['h2o', 32]:.2f}, full {found['full', None]:.2f}"
    return text, "the full cache is the best", found["full", None] <= min(found.values())


@criterion(3, "kvdsl eval fidelity (RoCo at 128 of 384)")
def _fidelity() -> Measured:
    words = ("--policies", "roco", "--budgets", "128", "--prompts", "4", "--prompt-tokens", "384", "--new-tokens", "48")
    row = kvdsl_json("eval", "fidelity", *words)["rows"][0]
    return (
        f"ROUGE-L {row['rougeL']}, BLEU {row['bleu']}, same prefix {row['same_prefix_tokens']}",
        "reported",
        0 <= row["rougeL"] <= 1,
    )


@criterion(3, "kvdsl eval retrieval (full cache, 512 tokens)")
def _retrieval() -> Measured:
    rows = kvdsl_json("eval", "retrieval", "--policies", "full", "--length", "512", "--trials", "4")["rows"]
    return ", ".join(f"{row['task']} {row['accuracy']:.0%}" for row in rows), "reported", len(rows) == 2
