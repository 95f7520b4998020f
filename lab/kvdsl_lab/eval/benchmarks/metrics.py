"""The metrics of LongBench and RULER, down to what their authors' scripts do with odd texts: figures can be laid beside published ones.

Each compares what a model wrote with what was wanted, and gives a number in 0..1.

Sources: `metrics.py` and `eval.py` of LongBench (Bai et al. 2024, https://github.com/THUDM/LongBench), `scripts/eval` of RULER (Hsieh et
al. 2024, https://github.com/NVIDIA/RULER).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from kvdsl.errors import KvdslError

# -- words in common ---------------------------------------------------------------------------------------------------


def token_f1(found: str, wanted: str) -> float:
    """F1 of the words in common, counted as often as they occur, without case, punctuation and articles (SQuAD's normalisation)."""
    return _f1(_plain_words(found), _plain_words(wanted))


def _plain_words(text: str) -> list[str]:
    bare = text.lower().translate(_NO_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def token_f1_chinese(found: str, wanted: str) -> float:
    """The same over the words that jieba finds in a Chinese text."""
    return _f1(_plain_chinese(found), _plain_chinese(wanted))


def _plain_chinese(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(_NO_CHINESE_PUNCTUATION).split()) for word in _segmented(text))
    return [word for word in bare if word]


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def _characters(*ranges: tuple[int, int]) -> str:
    return "".join(chr(code) for first, last in ranges for code in range(first, last + 1))


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The full-width forms and the dashes, quotes and brackets that LongBench takes away; opening 〈 《 are not among them.
_CHINESE_PUNCTUATION = _characters(
    (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64), (0x3001, 0x3003),
    (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0x2013, 0x2014), (0x2018, 0x2019),
    (0x201B, 0x201F), (0x2026, 0x2027), (0xFE4F, 0xFE4F),
)  # fmt: skip
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def check_installed(metric: str) -> None:
    """Raise KvdslError, with what to install, where a metric needs what is not there."""
    if metric.endswith("_zh"):
        _segmented("")


def _segmented(text: str) -> list[str]:
    """A Chinese text word by word."""
    try:
        import jieba
    except ImportError as error:
        raise KvdslError(
            "LongBench finds the words of Chinese texts with jieba, which is not installed: pip install jieba"
        ) from error
    return list(jieba.cut(text, cut_all=False))


# -- subsequences ------------------------------------------------------------------------------------------------------


def rouge_l(found: str, wanted: str) -> float:
    """ROUGE-L as the Python package `rouge` has it, which LongBench uses.

    That is its F-measure at the level of summaries (Lin 2004, section 3.2) over distinct words: of every pair of sentences, which
    full stops divide, the longest common subsequence; the distinct words of all of these, over the texts' distinct words.
    """
    ours, theirs = _sentences(found), _sentences(wanted)
    if not ours or not theirs:
        return 0.0
    common = {word for one in theirs for other in ours for word in longest_common_subsequence(one, other)}
    recall = len(common) / len({word for one in theirs for word in one})
    precision = len(common) / len({word for one in ours for word in one})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # A piece of nothing but spaces counts there as a sentence of one empty word.
    return [piece.split() or [""] for piece in text.split(".") if piece]


def rouge_l_chinese(found: str, wanted: str) -> float:
    """The same over the words that jieba finds in a Chinese text."""
    return rouge_l(" ".join(_segmented(found)), " ".join(_segmented(wanted)))


def longest_common_subsequence(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The longest sequence of words that both have in this order; of several, the one that ends first in `other`."""
    # length[i][j]: of the longest that the first i and the first j words have.
    length = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        row, after = length[i], length[i + 1]
        for j, another in enumerate(other):
            after[j + 1] = row[j] + 1 if word == another else max(row[j + 1], after[j])
    found, i, j = [], len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def edit_similarity(found: str, wanted: str) -> float:
    """How alike two lines of code are, in whole percents: Ratcliff and Obershelp's ratio of `difflib`, as fuzzywuzzy has it.

    Of what the model wrote, the first line counts that holds no comment and no Markdown.
    """
    lines = found.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    if line == wanted:
        return 1.0
    return round(100 * SequenceMatcher(None, line, wanted).ratio()) / 100


# -- classes and numbers -----------------------------------------------------------------------------------------------


def classification(found: str, wanted: str, classes: Sequence[str]) -> float:
    """1 if the wanted class, and no other, is named; a share of that if others are named as well.

    A class whose name is part of the wanted one's does not count, but the script takes these away from the list that it is walking
    through, and passes over the class that stands behind one; so does this.
    """
    named = [one for one in classes if one in found]
    at = 0
    while at < len(named):
        if named[at] in wanted and named[at] != wanted:
            del named[at]
        at += 1
    return 1 / len(named) if wanted in named else 0.0


def count(found: str, wanted: str) -> float:
    """Share of the numbers in what the model wrote that are the wanted one."""
    numbers = re.findall(r"\d+", found)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def retrieval(found: str, wanted: str) -> float:
    """The same for the number of a paragraph, `Paragraph 7` or `段落7`.

    Raises:
        KvdslError: if the wanted answer names no paragraph.
    """
    number = re.search(r"(?:Paragraph |段落)(\d+)", wanted)
    if number is None:
        raise KvdslError(f"the answer `{wanted[:40]}` names no paragraph; it should read `Paragraph 7` or `段落7`")
    return count(found, number[1])


LONGBENCH: dict[str, Callable[[str, str], float]] = {
    "f1": token_f1, "f1_zh": token_f1_chinese, "rouge_l": rouge_l, "rouge_l_zh": rouge_l_chinese, "count": count,
    "retrieval": retrieval, "edit_similarity": edit_similarity,
}  # fmt: skip
"""By name, all but `classification`, which also takes the classes."""


# -- RULER -------------------------------------------------------------------------------------------------------------


def string_match_all(found: str, wanted: Sequence[str]) -> float:
    """Share of the wanted strings that occur in what the model wrote, without case."""
    return sum(_matches(found, wanted)) / len(wanted)


def string_match_part(found: str, wanted: Sequence[str]) -> float:
    """1 if any of them does."""
    return float(any(_matches(found, wanted)))


def _matches(found: str, wanted: Sequence[str]) -> list[bool]:
    printable = re.sub(r"[\x00-\x1f]", "\n", found.strip()).strip().lower()
    return [one.lower() in printable for one in wanted]
