"""The IR of every shipped policy, and what the policies promise as files."""

import re
from pathlib import Path

import pytest

from kvdsl.compiler import analyse, find_policy, shipped_policies
from kvdsl.ir.nodes import Axis, Input, Keep, Number, Param, ParamRef, Reduce, call
from kvdsl.ir.printer import print_policy
from kvdsl.source import SourceFile

BUDGET = ParamRef(name="budget")
ATTN = Input(name="attn")
SUM_ATTN = Reduce(op="sum", axis=Axis.QUERY, body=ATTN)
HALF = call("/", Input(name="budget"), Number(value=2))
LAST_1 = Keep(scope="last", count=Number(value=1))
P_BUDGET = Param(name="budget", default=Number(value=512))
P_RECENT = Param(name="recent", default=HALF)
KEEP_RECENT = Keep(scope="last", count=ParamRef(name="recent"))
NORM1_V = Reduce(op="sum", axis=Axis.DIM, body=call("abs", Input(name="v")))
POSITION = Input(name="position")

EXPECTED = {
    "full": ("Full", (), None, None, ()),
    "random": ("Random", (P_BUDGET,), BUDGET, call("random"), ()),
    "window": ("Window", (P_BUDGET,), BUDGET, POSITION, (LAST_1,)),
    "streaming_llm": (
        "StreamingLLM",
        (Param(name="sinks", default=Number(value=4)), P_BUDGET),
        BUDGET,
        POSITION,
        (Keep(scope="first", count=ParamRef(name="sinks")), LAST_1),
    ),
    "h2o": ("H2O", (P_BUDGET, P_RECENT), BUDGET, SUM_ATTN, (KEEP_RECENT,)),
    "scissorhands": (
        "ScissorHands",
        (P_BUDGET, P_RECENT),
        BUDGET,
        Reduce(
            op="sum",
            axis=Axis.QUERY,
            body=call(">", ATTN, Reduce(op="mean", axis=Axis.SLOT, body=ATTN)),
        ),
        (KEEP_RECENT,),
    ),
    "tova": ("TOVA", (P_BUDGET,), BUDGET, Reduce(op="last", axis=Axis.QUERY, body=ATTN), ()),
    "roco": (
        "RoCo",
        (P_BUDGET, Param(name="protect", default=HALF)),
        BUDGET,
        Reduce(op="mean", axis=Axis.QUERY, body=ATTN),
        (
            Keep(scope="top", count=ParamRef(name="protect"), by=Reduce(op="std", axis=Axis.QUERY, body=ATTN)),
            LAST_1,
        ),
    ),
    "vatp_h2o": (
        "VATP_H2O",
        (P_BUDGET, P_RECENT, Param(name="sinks", default=Number(value=20))),
        BUDGET,
        call("*", SUM_ATTN, NORM1_V),
        (KEEP_RECENT, Keep(scope="first", count=ParamRef(name="sinks"))),
    ),
}


@pytest.mark.parametrize("stem", EXPECTED)
def test_ir(stem: str) -> None:
    policy = analyse(find_policy(stem)).policy
    assert (policy.name, policy.params, policy.budget, policy.score, policy.keeps) == EXPECTED[stem]
    positions = "compact" if stem == "streaming_llm" else "original"
    assert (policy.stem, policy.group, policy.positions) == (stem, "mean", positions)
    assert (policy.trigger, policy.slack, policy.max_drop, policy.columns) == (
        Number(value=1),
        Number(value=0),
        Number(value=0),
        (),
    )


WARNINGS = {
    "scissorhands_window": ["KV0422"],
    "vatp_scissorhands": ["KV0422"],
}


def test_every_shipped_policy_is_among_them() -> None:
    assert {path.stem for path in shipped_policies()} >= set(EXPECTED)


@pytest.mark.parametrize("path", shipped_policies(), ids=lambda path: path.stem)
def test_shipped_policies_are_clean_short_and_documented(path: Path) -> None:
    analysis = analyse(path)
    assert [found.code for found in analysis.diagnostics] == WARNINGS.get(path.stem, [])
    text = path.read_text()
    assert text.startswith("kv 2\n")
    assert 'import "' not in text  # shipped policies have names of their own
    statements = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert len([line for line in statements.split("{")[1].split("\n") if re.match(r"\s*\w", line)]) <= 12
    assert len(analysis.policy.doc) > 40
    assert analysis.policy.doc.split("\n")[0].endswith(".")


@pytest.mark.parametrize("path", shipped_policies(), ids=lambda path: path.stem)
def test_a_printed_policy_means_the_same(path: Path) -> None:
    policy = analyse(path).policy
    assert analyse(SourceFile(path.name, print_policy(policy), path)).policy == policy


@pytest.mark.parametrize(("name", "score"), [("aas", "sum(attn)"), ("mas", "mean(attn)"), ("ltas", "last(attn)")])
def test_the_prelude_names_the_papers_scores(name: str, score: str) -> None:
    from tests.diagnostics.expect import policy

    assert policy("param budget = 8", f"score {name}").score == policy("param budget = 8", f"score {score}").score


def test_the_prelude_names_the_quantised_score() -> None:
    from tests.diagnostics.expect import policy

    assert policy("param budget = 8", "score aqas").score == analyse(find_policy("scissorhands")).policy.score
