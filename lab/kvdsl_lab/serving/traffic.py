"""Requests that come by chance: when, how long their prompts are, and how long their answers will be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        arrival: seconds after the first could have come.
        prompt, new: tokens, at least 1 each.
    """

    arrival: float
    prompt: int
    new: int


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of tokens, said by its median and its mean, which is the higher of the two."""

    median: float
    mean: float

    def draw(self, chance: random.Random) -> int:
        """At least one token."""
        # The mean of a log-normal is its median times exp(sigma ** 2 / 2).
        return max(1, round(self.median * math.exp(chance.gauss(0, math.sqrt(2 * math.log(self.mean / self.median))))))


@dataclass(frozen=True)
class Traffic:
    """Lengths of prompts and of answers, drawn independently."""

    prompts: Lengths
    answers: Lengths

    def requests(self, count: int, rate: float, longest: int, seed: int) -> list[Asked]:
        """Requests in the order in which they come, by a Poisson process.

        Args:
            rate: requests a second; infinity has all of them come at once.
            longest: tokens of a prompt and its answer together; prompts are cut to half of it, then answers to what is left.
        """
        chance, now, found = random.Random(seed), 0.0, []
        for _ in range(count):
            now += chance.expovariate(rate) if math.isfinite(rate) else 0.0
            prompt = min(self.prompts.draw(chance), longest // 2)
            found.append(Asked(now, prompt, min(self.answers.draw(chance), longest - prompt)))
        return found


CONVERSATION = Traffic(Lengths(1020, 1154.7), Lengths(129, 211.1))
"""Medians and means of the 19,366 requests of `AzureLLMInferenceTrace_conv.csv` in github.com/Azure/AzurePublicDataset (Patel et al.,
"Splitwise", ISCA 2024; CC-BY). That they are log-normal is an assumption; the trace itself has peaks."""

TRAFFIC = {
    "conversation": CONVERSATION,
    "long answers": Traffic(CONVERSATION.prompts, Lengths(8 * CONVERSATION.answers.median, 8 * CONVERSATION.answers.mean)),
}
"""By name; the second is made up: the same prompts, and answers eight times as long, as of a model that thinks before it answers."""
