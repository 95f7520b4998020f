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
from pathlib import Path
from typing import Any

import torch

import kvdsl
from kvdsl.environment import environment
from kvdsl.generation.models import encode
from kvdsl.generation.spans import rendered

POLICIES = {
    "everything": ("full", {}),
    "H2O": ("h2o", {"budget": 768}),
    "a window": ("streaming_llm", {"budget": 768}),
    "thinking dropped": ("drop_thinking", {}),
    "tools decayed": ("decay_tools", {"budget": 768}),
}  # fmt: skip
CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Turin", "Perth", "Dakar", "Kyoto")
ROOMS = ("Amber", "Birch", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Heron")


def session(draw: random.Random) -> tuple[list[tuple[list[dict[str, str]], str]], list[tuple[str, str, str]]]:
    """A session's turns, new messages and what the assistant says, and questions: what they are about, their words, the answer."""
    city, desk, code = draw.choice(CITIES), draw.randint(100, 999), draw.randint(1000, 9999)
    turns, questions = [], []
    system = f"You are a hotel's assistant. The front desk has extension {desk}. Answer in one short sentence."
    questions.append(("system", "Which extension does the front desk have?", str(desk)))
    for number in range(5):
        rooms = draw.sample(ROOMS, 6)
        prices = [draw.randint(60, 400) for _ in rooms]
        table = json.dumps([
            {"room": room, "price": price, "floor": draw.randint(1, 9), "beds": draw.randint(1, 4)} for room, price in zip(rooms, prices, strict=True)
        ])  # fmt: skip
        night, cheapest = 3 + number, min(prices)
        ask = f"What is the cheapest room on night {night}?"
        if number == 0:
            ask = f"I come from {city}, and my booking is {code}. " + ask
            questions += [("user", "Which city do I come from?", city), ("user", "What is the number of my booking?", str(code))]
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
        out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=copy.deepcopy(cache), max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def run(model: Any, tokenizer: Any, policy: str, sessions: int, seed: int) -> dict[str, Any]:
    """All sessions under a policy."""
    name, params = POLICIES[policy]
    turns: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for number in range(sessions):
        steps, questions = session(random.Random(seed + number))
        cache = kvdsl.load(name)(model, **params)
        talk = kvdsl.chat(model, tokenizer, cache)
        for turn, (messages, said) in enumerate(steps):
            first = FirstToken()
            talk(messages, streamer=first, **saying(tokenizer, said))
            held = max(int((cache.positions(layer) >= 0).sum(-1).max()) for layer in cache.managed)
            turns.append({"session": number, "turn": turn, "read": len(talk.ids), "held": held, "bytes": cache.bytes(), "first_token_s": first.seconds})
        for about, question, wanted in questions:
            found = ask(model, tokenizer, talk, cache, question)
            answers.append({"session": number, "about": about, "question": question, "wanted": wanted, "found": found, "right": wanted in found})
        print(policy, number, [(one["held"], round(one["first_token_s"], 2)) for one in turns[-5:]], sum(one["right"] for one in answers), len(answers), flush=True)
    return {"policy": name, "params": params, "turns": turns, "answers": answers}


def table(found: dict[str, dict[str, Any]]) -> str:
    """What docs/howto/chats.md shows."""
    abouts = ["system", "user", "tool", "answer"]
    lines = [
        "| kept | tokens held in the last turn | MiB | first token, turns 1 to 5 (s) | right about: " + " | ".join(abouts) + " |",
        "|---|---:|---:|---|" + "---:|" * len(abouts),
    ]
    for policy, one in found.items():
        last = max(turn["turn"] for turn in one["turns"])
        of_turn = [[turn for turn in one["turns"] if turn["turn"] == number] for number in range(last + 1)]
        middle = lambda name, turns: statistics.median(turn[name] for turn in turns)  # noqa: E731
        times = " ".join(f"{middle('first_token_s', turns):.2f}" for turns in of_turn)
        right = [[answer["right"] for answer in one["answers"] if answer["about"] == about] for about in abouts]
        shares = " | ".join(f"{sum(found)} of {len(found)}" for found in right)
        lines.append(f"| {policy} | {middle('held', of_turn[-1]):,.0f} | {middle('bytes', of_turn[-1]) / 2**20:.1f} | {times} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Run every policy and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model, tokenizer = kvdsl.load_model(given.model)
    found = {policy: run(model, tokenizer, policy, given.sessions, given.seed) for policy in POLICIES}
    told = environment(dtype=str(model.dtype).removeprefix("torch."), seed=given.seed)
    given.out.write_text(json.dumps({"environment": told, "model": given.model, "sessions": given.sessions, "found": found}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
