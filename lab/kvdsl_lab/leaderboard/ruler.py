"""RULER's tasks, made from the paper's description (Hsieh et al. 2024, section 3 and appendices): 7 digits, words, or UUIDs hidden in
hay; a chain of variables; the most common words of a list, and of a coded text.

The words of the prompts are RULER's, the fillers are not: books that come with kvdsl-lab stand for its essays, `wonderwords` makes the
names. Question answering needs SQuAD and HotpotQA, which are not here: `kvdsl eval ruler` runs it from files that RULER has prepared.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvdsl_lab.leaderboard import haystacks
from kvdsl_lab.leaderboard.questions import Question


@dataclass(frozen=True)
class Material:
    """What texts are made of.

    Attributes:
        rng: where everything random comes from.
        book: sentences.
        tokens: how long the text may be.
        count: how many tokens a text has.
    """

    rng: np.random.Generator
    book: Sequence[str]
    tokens: int
    count: Callable[[str], int]

    def fitted(self, make: Callable[[int], str]) -> str:
        return haystacks.fitted(make, self.tokens, self.count)


# -- needles in a haystack ---------------------------------------------------------------------------------------------

_PLURAL = {"number": "numbers", "uuid": "uuids"}
_TOKENS = {"number": 16, "uuid": 48}
"""Enough for one answer and what stands around it; RULER allows 128 for all of them."""


@dataclass(frozen=True)
class Needles:
    """A needle task.

    Attributes:
        hay: `noise`, `book`, or `needles`: the rest are needles, too.
        key, value: `word`, `number` or `uuid`.
        keys, values, asked: how many keys have needles, how many each, and of how many the question is.
    """

    hay: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    asked: int = 1

    def __call__(self, material: Material) -> Question:
        """A text with its needles and the question."""
        rng = material.rng
        pairs = {_thing(rng, self.key): [_thing(rng, self.value) for _ in range(self.values)] for _ in range(self.keys)}
        needles = [self._sentence(key, value) for key, values in pairs.items() for value in values]
        rng.shuffle(needles)
        asked = list(pairs)[: self.asked]
        answers = [value for key in asked for value in pairs[key]]
        instruction, question, opening = self._words(_listed(asked), several=len(answers) > 1)
        make = self._maker(rng, material.book, needles)
        text = material.fitted(lambda size: f"{instruction}\n{make(size)}")
        return Question(text, question, opening, answers, new_tokens=_TOKENS[self.value] * len(answers))

    def _maker(self, rng: np.random.Generator, book: Sequence[str], needles: Sequence[str]) -> Callable[[int], str]:
        """The text by its size; whatever the size, what is random in it stays as it is."""
        seed, start = int(rng.integers(2**32)), int(rng.integers(2**32))
        if self.hay == "needles":
            others = cache(lambda index: self._other(start, index))

        def make(size: int) -> str:
            again = np.random.default_rng(seed)
            if self.hay == "noise":
                hay = haystacks.noise(size)
            elif self.hay == "book":
                hay = haystacks.from_book(again, book, size)
            else:
                hay = [others(index) for index in range(size)]
            return " ".join(haystacks.hide(again, hay, needles))

        return make

    def _other(self, start: int, index: int) -> str:
        rng = np.random.default_rng([start, index])
        return self._sentence(_thing(rng, self.key), _thing(rng, self.value))

    def _sentence(self, key: str, value: str) -> str:
        return f"One of the special magic {_PLURAL[self.value]} for {key} is: {value}."

    def _words(self, query: str, several: bool) -> tuple[str, str, str]:
        """Instruction, question and opening, in RULER's words."""
        things = _PLURAL[self.value] if several else self.value
        some, are = ("Some", "are") if several else ("A", "is")
        what = "What are all the" if several else "What is the"
        return (
            f"{some} special magic {things} {are} hidden within the following text. Make sure to memorize it. I will quiz you about the "
            f"{things} afterwards.",
            f"{what} special magic {things} for {query} mentioned in the provided text?",
            f"The special magic {things} for {query} mentioned in the provided text {are}",
        )


def _thing(rng: np.random.Generator, kind: str) -> str:
    if kind == "number":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuid":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


@cache
def _words(category: str) -> list[str]:
    """Words of one piece, in a fixed order."""
    from wonderwords import RandomWord

    found = RandomWord().filter(include_categories=[category])
    return sorted({word for word in found if word.isalpha() and word.islower()})


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


# -- tracing and counting ----------------------------------------------------------------------------------------------


def variable_tracking(material: Material, hops: int = 4) -> Question:
    """Which variables have a value, along one chain of assignments in noise; a short example stands before."""
    rng = material.rng
    example, example_names, example_value = _chain(rng, hops)
    chain, names, value = _chain(rng, hops)
    seed = int(rng.integers(2**32))

    def text(size: int, assignments: Sequence[str]) -> str:
        return " ".join(haystacks.hide(np.random.default_rng(seed), haystacks.noise(size), assignments))

    instruction = "Memorize and track the chain(s) of variable assignment hidden in the following text."

    def asked(of: str) -> tuple[str, str]:
        return (
            f"Question: Find all variables that are assigned the value {of} in the text above.",
            f"Answer: According to the chain(s) of variable assignment in the text above, {hops + 1} variables are assigned the value "
            f"{of}, they are:",
        )

    shown = f"{instruction}\n\n{text(20, example)}\n{' '.join(asked(example_value))} {' '.join(example_names)}"
    whole = material.fitted(lambda size: f"{shown}\n\n{instruction}\n\n{text(size, chain)}")
    question, opening = asked(value)
    return Question(whole, question, opening, names, new_tokens=30)


def _chain(rng: np.random.Generator, hops: int) -> tuple[list[str], list[str], str]:
    """Assignments, the names in them, and the value."""
    names = ["".join(rng.choice(list(string.ascii_uppercase), size=5)) for _ in range(hops + 1)]
    value = str(rng.integers(10**4, 10**5))
    firsts = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {what}." for name, what in zip(names, firsts, strict=False)], names, value


def common_words(material: Material, common: int = 10, times: int = 30, rare_times: int = 3) -> Question:
    """The ten words of a list that come thirty times; the others come three times."""
    rng = material.rng
    words = [str(word) for word in rng.permutation(_words("noun"))]
    answers, others = words[:common], words[common:]
    seed = int(rng.integers(2**32))

    def listed(size: int) -> str:
        drawn = np.random.default_rng(seed).permutation(answers * times + others[:size] * rare_times)
        numbered = " ".join(f"{number}. {word}" for number, word in enumerate(drawn, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most "
            f"often.\n{numbered}"
        )

    question = f"Question: What are the {common} most common words in the above list?"
    opening = f"Answer: The top {common} words that appear most often in the list are:"
    return Question(material.fitted(listed), question, opening, answers, new_tokens=120)


def frequent_words(material: Material, asked: int = 3, exponent: float = 2.0) -> Question:
    """The three most frequent words of a coded text whose words follow Zipf's law; what would be the first is dots."""
    rng = material.rng
    letters = list(string.ascii_lowercase)
    words = ["....", *dict.fromkeys("".join(rng.choice(letters, size=6)) for _ in range(500))]
    weights = np.arange(1, len(words) + 1) ** -exponent
    seed = int(rng.integers(2**32))

    def coded(size: int) -> str:
        drawn = np.random.default_rng(seed).choice(words, size=size, p=weights / weights.sum())
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded "
            f"words. {' '.join(drawn)}"
        )

    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the "
        "above coded text?"
    )
    opening = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return Question(material.fitted(coded), question, opening, words[1 : asked + 1], new_tokens=50)


TASKS: dict[str, Callable[[Material], Question]] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("book"),
    "niah_single_3": Needles("book", value="uuid"),
    "niah_multikey_1": Needles("book", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("book", values=4),
    "niah_multiquery": Needles("book", keys=4, asked=4),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
"""By their published names."""
