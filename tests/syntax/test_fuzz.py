"""Whatever the input, there is a result: no traceback, and within a second."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdsl.compiler import analyse
from kvdsl.diagnostics import Sink, render_human
from kvdsl.ir.printer import print_policy
from kvdsl.passes.fold import fold
from kvdsl.source import SourceFile
from kvdsl.syntax.parser import parse
from kvdsl.syntax.reader import MAX_BYTES, decode
from scripts.fuzz import check as fuzz
from tests.quick import few
from tests.work import calls


def survives(data: bytes) -> None:
    """Checks bytes and shows what was found; a policy without errors is printed, read again and found the same."""
    if fuzz.check(data) != "clean":
        return
    source = decode(data, Sink(), "example.kv", fuzz.BESIDE)
    assert source is not None
    for policy in analyse(source).policies:
        again = analyse(SourceFile("example.kv", print_policy(policy), fuzz.BESIDE))
        assert again.policies == (policy,)
        fold(policy)


@pytest.mark.parametrize("kind", sorted({*fuzz.KINDS}, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_random_inputs(kind: fuzz.Kind) -> None:
    """A small run of what `scripts/fuzz/check.py` does with a million."""
    rng = random.Random(0)
    for _ in range(75):
        survives(kind(rng))


@pytest.mark.parametrize("seed", few(range(8), 0))
def test_mutated_policies(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        survives(fuzz.mutated(rng))


FOUND = [b'test""{prompt{6times', b'kv 1\ntest "a" {\n  prompt {\n    3 times\n  }\n}\n']


@pytest.mark.parametrize("data", FOUND)
def test_what_once_failed(data: bytes) -> None:
    survives(data)


def test_derivations_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names are no words that mean something in places."""
    monkeypatch.setattr(fuzz, "NAMES", ["attn", "position", "f", "x"])
    rng = random.Random(0)
    for _ in range(100):
        for text in (fuzz.derived_policy(rng), fuzz.derived_file(rng)):
            sink = Sink()
            parse(SourceFile("example.kv", text.decode()), sink)
            assert not [one.message for one in sink]


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script notices a traceback, and can find its input again."""

    def broken(data: bytes) -> str:
        raise RecursionError

    monkeypatch.setattr(fuzz, "check", broken)
    found = fuzz.run_one(0, 7)
    assert found["outcome"] == "failed"
    assert "RecursionError" in found["error"]
    assert found["input"].encode("latin-1") == fuzz.example(0, 7)[1]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    survives(data)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(fuzz.WORDS), max_size=60))
def test_any_words(words: list[bytes]) -> None:
    survives(b'kv 1\npolicy P {\n"d"\nparam budget = 512\n' + b" ".join(words) + b"\n}\n")


REPEATED = [
    "(", "-", "not ", "2**", ";", "a ", "\n", "{", "}", ")", '"', "'", '"""', "score\n", "param a=1\n", "policy a {", "let a=1\n",
    "policy a {}\n", 'import "h2o.kv"\n', "import h2o\n", "1+", "f(", "max(", "keep ", "é", "×", "\\", "..", "a,", "override ",
    "kv 1\n", "\r", "\u2028", "keep last 1\n", "sum(attn over ", "x\n",
]  # fmt: skip

PLACES = ["{}", 'kv 1\npolicy P {{\n"d"\nparam budget = 512\n{}', "kv 1\npolicy P {{\nscore {}"]

LONG = {
    "sum": "score " + "+".join(["position"] * 6_000),
    "doubling": "let a0=age\n" + "\n".join(f"let a{i + 1}=a{i}+a{i}" for i in range(200)) + "\nscore a200",
    "doubling backwards": "score a0\n" + "\n".join(f"let a{i}=a{i + 1}+a{i + 1}" for i in range(200)) + "\nlet a200=age",
    "towers": "let f0(x)=x+x\n" + "\n".join(f"let f{i + 1}(x)=f{i}(f{i}(x))" for i in range(200)) + "\nscore f200(age)",
    "arguments": "score max(" + ",".join(["age"] * 7_000) + ")",
    "parameters": "let f(" + ",".join(f"a{i}" for i in range(7_000)) + ")=1\nscore f(1)",
    "a name": "score " + "a" * 60_000,
    "a number": "score age + " + "9" * 60_000,
    "powers": "score age ** 9**9**9**9",
    "unknown names": "\n".join(f"let q{i} = unknown{i} + w{i} + r{i}" for i in range(2_000)),
}


HUNGRY = [piece * MAX_BYTES for piece in ("(", "-", "{", "f(", "keep last 1\n")] + [LONG["doubling"], LONG["unknown names"]]
TEXTS = [*(piece * MAX_BYTES for piece in REPEATED), *LONG.values()]
WHERE = [(PLACES[-1], text) for text in TEXTS] + [(where, text) for where in PLACES[:-1] for text in HUNGRY]


@pytest.mark.parametrize(
    ("where", "text"), few(WHERE, *((PLACES[-1], text) for text in HUNGRY)), ids=lambda text: repr(text[:12])
)
def test_work_grows_with_the_text_alone(where: str, text: str) -> None:
    """The hungriest of these takes 136 calls for a byte, about a second; what went over a text again and again would take thousands."""
    length = MAX_BYTES // 2
    source = SourceFile("example.kv", where.format(text)[:length])
    assert calls(lambda: render_human(analyse(source).diagnostics)) < 250 * length
