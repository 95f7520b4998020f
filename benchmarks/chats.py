"""Chats with tools and thinking under several policies: tokens held, bytes, time to the first token, and what is remembered of early turns.

python benchmarks/chats.py --out results/cpu/chats.json

The sessions are made here (Apache-2.0, as kvdsl) from random facts. What the assistant says in a turn is given, so that all policies
read the same text; each answer to a question is the model's own, in a copy of the cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import kvdsl
from kvdsl.environment import environment
from kvdsl.generation.models import encode
from kvdsl.generation.spans import rendered

POLICIES = {
    "everything": ("full", {}),
    "H2O": ("h2o", {"budget": 320}),
    "a window": ("streaming_llm", {"budget": 320}),
    "thinking dropped": ("drop_thinking", {}),
    "thinking dropped, gaps closed": ("drop_thinking with positions compact", {}),
    "tools decayed": ("decay_tools", {"budget": 320}),
}  # fmt: skip
TURNS = 4

CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Turin", "Perth", "Dakar", "Kyoto")
ROOMS = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Heron")


def session(draw: random.Random) -> tuple[list[tuple[list[dict[str, str]], str]], list[tuple[str, str, str]]]:
    """A session's turns, new messages and what the assistant says, and questions: what they are about, their words, the answer."""
    city, desk, code = draw.choice(CITIES), draw.randint(100, 999), draw.randint(1000, 9999)
    turns, questions = [], []
    system = f"You are a hotel's assistant. The front desk has extension {desk}. Answer in one short sentence."
    questions.append(("system", "Which extension does the front desk have?", str(desk)))
    for number in range(TURNS):
        rooms = draw.sample(ROOMS, 4)
        prices = [draw.randint(60, 400) for _ in rooms]
        offers = zip(rooms, prices, strict=True)
        table = json.dumps(
            [
                {"room": room, "price": price, "floor": draw.randint(1, 9), "beds": draw.randint(1, 4)}
                for room, price in offers
            ]
        )
        night, cheapest = 3 + number, min(prices)
        ask = f"What is the cheapest room on night {night}?"
        if number == 0:
            ask = f"I come from {city}, and my booking is {code}. " + ask
            questions += [
                ("user", "Which city do I come from?", city),
                ("user", "What is the number of my booking?", str(code)),
            ]
        messages = [{"role": "user", "content": ask}, {"role": "tool", "content": table}]
        thought = ", ".join(f"{room} costs {price}" for room, price in zip(rooms, prices, strict=True))
        said = f"<think>\n{thought}. The least is {cheapest}.\n</think>\nNight {night}: {rooms[prices.index(cheapest)]}, for {cheapest}."
        turns.append(([{"role": "system", "content": system}, *messages] if number == 0 else messages, said))
        if number < 2:
            questions.append(("answer", f"What did the cheapest room on night {night} cost?", str(cheapest)))
            questions.append(("tool", f"What did {rooms[0]} cost on night {night}?", str(prices[0])))
    return turns, questions


class FirstToken:
    """A streamer of transformers that notes when the first token is there."""

    def __init__(self) -> None:
        self.begun, self.seconds, self._puts = time.process_time(), 0.0, 0

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:  # the first one is the prompt
            self.seconds = time.process_time() - self.begun

    def end(self) -> None:
        """Nothing to do."""


def saying(tokenizer: Any, text: str) -> dict[str, Any]:
    """Settings of `generate` under which the model says this."""
    words, begun = [*encode(tokenizer, text), tokenizer.eos_token_id], []

    def allowed(_: int, ids: Any) -> list[int]:
        begun.append(len(ids))
        return [words[len(ids) - begun[0]]]

    return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": len(words), "do_sample": False}


def ask(model: Any, tokenizer: Any, talk: Any, cache: Any, question: str) -> str:
    """The model's answer, in a copy of the cache."""
    whole = rendered(tokenizer, [{"role": "user", "content": question}], answer=True)
    end = tokenizer.eos_token
    ids = torch.tensor([[*talk.ids, *encode(tokenizer, end + "\n" + whole[whole.index("<|im_start|>user") :])]])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=copy.deepcopy(cache), max_new_tokens=12, do_sample=False
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def run(model: Any, tokenizer: Any, policy: str, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A session under a policy: what each turn takes, and what is answered."""
    name, params = POLICIES[policy]
    steps, questions = session(random.Random(seed))
    cache = kvdsl.load(name)(model, **params)
    talk = kvdsl.chat(model, tokenizer, cache)
    turns, answers = [], []
    for messages, said in steps:
        first = FirstToken()
        talk(messages, streamer=first, **saying(tokenizer, said))
        held = max(int((cache.positions(layer) >= 0).sum(-1).max()) for layer in cache.managed)
        turns.append({"read": len(talk.ids), "held": held, "bytes": cache.bytes(), "first_token_s": first.seconds})
    for about, question, wanted in questions:
        found = ask(model, tokenizer, talk, cache, question)
        answers.append({"about": about, "question": question, "wanted": wanted, "found": found, "right": wanted in found})
    return turns, answers


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """What docs/howto/chats.md shows."""
    abouts = ["system", "user", "tool", "answer"]
    lines = [
        "| kept | tokens held in the last turn | MiB | first token, turn by turn (s) | right about: "
        + " | ".join(abouts)
        + " |",
        "|---|---:|---:|---|" + "---:|" * len(abouts),
    ]
    for policy, sessions in found.items():
        of_turn = list(zip(*(one["turns"] for one in sessions), strict=True))
        times = " ".join(f"{_median('first_token_s', turns):.2f}" for turns in of_turn)
        answers = [answer for one in sessions for answer in one["answers"]]
        right = [[answer["right"] for answer in answers if answer["about"] == about] for about in abouts]
        shares = " | ".join(f"{sum(found)} of {len(found)}" for found in right)
        held, mib = _median("held", of_turn[-1]), _median("bytes", of_turn[-1]) / 2**20
        lines.append(f"| {policy} | {held:,.0f} | {mib:.1f} | {times} | {shares} |")
    return "\n".join(lines)


def _median(name: str, turns: Sequence[dict[str, Any]]) -> float:
    return statistics.median(turn[name] for turn in turns)


def main() -> None:
    """Run every policy and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model, tokenizer = kvdsl.load_model(given.model)
    told = environment(dtype=str(model.dtype).removeprefix("torch."), seed=given.seed)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for number in range(given.sessions):
        for policy in POLICIES:
            turns, answers = run(model, tokenizer, policy, given.seed + number)
            found[policy].append({"turns": turns, "answers": answers})
            print(
                policy,
                number,
                [turn["held"] for turn in turns],
                sum(answer["right"] for answer in answers),
                len(answers),
                flush=True,
            )
        record = {"environment": told, "model": given.model, "policies": POLICIES, "found": found}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
