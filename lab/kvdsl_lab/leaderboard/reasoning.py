"""Whether a model that writes step by step comes to the right answer under a policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.generation.generate import padding
from kvdsl.generation.models import check_length
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.leaderboard.answers import right, written
from kvdsl_lab.leaderboard.kinds import Lab, MakeCache, Outcome, ends, outcome
from kvdsl_lab.leaderboard.problems import Problem
from kvdsl_lab.leaderboard.questions import begun, template

ASKED = "Solve this step by step, and put the final answer into \\boxed{}."


@dataclass(frozen=True)
class Reasoning:
    """The share of right answers to problems of arithmetic or mathematics, 0..1; an item is a batch of `rows` problems, padded at the left.

    `accuracy`: of a problem's answers. `answer_tokens`: how long they are, and `cut_off`: the share that reached the limit.
    """

    rows: int = 32
    measures = ("accuracy", "answer_tokens", "cut_off")

    def check(self, lab: Lab, task: str, items: int) -> None:
        there = len(lab.asking.problems.get(task, ()))
        if not there:
            raise KvdslError(f"`{task}` asks problems out of a file: give one with --data")
        if there < items * self.rows:
            fewer = f"ask for at most {there // self.rows} --items, or " if there >= self.rows else ""
            raise KvdslError(
                f"{items} items of `{task}` are {items * self.rows} problems, and --data has {there}: {fewer}give more files"
            )
        asked = lab.asking.problems[task][: items * self.rows]
        check_length(lab.model, max(len(_prompt(lab, problem)) for problem in asked) + lab.asking.new_tokens)

    def prepare(self, lab: Lab, task: str, number: int) -> _Batch:
        """The problems as a batch of prompts, each as often as it is to be answered."""
        problems = lab.asking.problems[task][number * self.rows : (number + 1) * self.rows]
        prompts = [_prompt(lab, problem) for problem in problems]
        longest = max(map(len, prompts))
        pad = padding(lab.tokenizer) or 0  # which token does not matter, since it is masked
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        seed = int(lab.rng(task, number).integers(2**31))
        copies = lab.asking.samples
        return _Batch(problems, ids.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0), seed)

    def start(self, lab: Lab, item: _Batch, make_cache: MakeCache) -> Any:
        """An empty cache."""
        return make_cache()

    def finish(self, lab: Lab, item: _Batch, started: Sequence[Any]) -> list[Outcome]:
        """Answer under one cache after the other; bytes and times are a row's share."""
        return [self._answered(lab, item, cache) for cache in started]

    def _answered(self, lab: Lab, item: _Batch, cache: Any) -> Outcome:
        begun_at = time.perf_counter()
        answers = _answers(lab, item, cache)
        steps = max(1, answers.shape[1])
        ms = (time.perf_counter() - begun_at) * 1e3 / steps / len(answers)  # the prompt's share is in it
        stops = ends(lab)
        lengths = [_length(row, stops) for row in answers.tolist()]
        texts = [
            lab.tokenizer.decode(row[:length], skip_special_tokens=True)
            for row, length in zip(answers, lengths, strict=True)
        ]
        copies = lab.asking.samples
        wanted = [problem.answer for problem in item.problems for _ in range(copies)]
        scores = [float(right(written(text), answer)) for text, answer in zip(texts, wanted, strict=True)]
        cut = [float(length >= lab.asking.new_tokens) for length in lengths]
        values = {
            name: [sum(own[at : at + copies]) / copies for at in range(0, len(own), copies)]
            for name, own in (
                ("accuracy", scores),
                ("answer_tokens", [float(length) for length in lengths]),
                ("cut_off", cut),
            )
        }
        return outcome(lab, cache, values, len(answers), token_ms=lambda: ms)


@dataclass(frozen=True)
class _Batch:
    """Problems, and prompts of them: int64 [problems × samples, tokens] with their mask."""

    problems: Sequence[Problem]
    ids: Tensor
    mask: Tensor
    seed: int


def _prompt(lab: Lab, problem: Problem) -> list[int]:
    """The tokens of a chat that asks the problem."""
    before, after = template(lab.tokenizer, "user")
    return begun(lab.tokenizer, f"{before}{problem.text}\n\n{ASKED}{after}")


def _answers(lab: Lab, item: _Batch, cache: Any) -> Tensor:
    """The tokens behind the prompts, int64 [rows, up to `new_tokens`], padded where an answer has ended."""
    drawn: dict[str, Any] = {"do_sample": False}
    if lab.asking.samples > 1:
        torch.manual_seed(item.seed)
        drawn = {"do_sample": True, "temperature": lab.asking.temperature, "top_k": 0, "top_p": 1.0}
    device = lab.model.device
    with torch.inference_mode():
        made: Tensor = lab.model.generate(
            input_ids=item.ids.to(device), attention_mask=item.mask.to(device), max_new_tokens=lab.asking.new_tokens,
            pad_token_id=padding(lab.tokenizer), **drawn, **with_cache(cache),
        )  # fmt: skip
    return made[:, item.ids.shape[1] :].cpu()


def _length(row: Sequence[int], ends: Sequence[int]) -> int:
    """Tokens of an answer up to where it ends."""
    return next((at for at, token in enumerate(row) if token in ends), len(row))
