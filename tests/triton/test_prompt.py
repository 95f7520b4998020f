"""What prompts leave in the columns, by the kernels `observe` and `over_slots`: the cases of `tests.runtime.test_prefill`, and few more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu.prompt import refuse_far
from kvdsl.runtime.gpu.sizes import Sizes
from kvdsl.runtime.torch import statistics
from tests.differential import test_statements
from tests.differential.cases import compare
from tests.quick import few
from tests.runtime.test_prefill import CASES, RING, SCORE, WATCH, Case, check_prompt
from tests.texts import policy_of, spec_of

FEW = WATCH.replace(SCORE, f"std(attn) + last(attn) + sum(attn over last {RING} queries)")
LOGITS = WATCH.replace(SCORE, "mean(logit) + sum(logit > max(logit over slots) - std(logit over slots)) + sum(attn)")
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 slots and queries, so that a short prompt has several of them; and torch's observer may not help."""
    monkeypatch.setattr(Sizes, "observe_slots", 32)
    monkeypatch.setattr(Sizes, "observe_queries", 32)
    monkeypatch.setattr(statistics, "observe", lambda *_: pytest.fail("observed by torch"))


def check(text: str, case: Case) -> None:
    """On fewer tokens and heads: in the interpreter a tile takes tenths of a second."""
    spec, short = spec_of(text), replace(case, tokens=min(case.tokens, 45), heads=1)
    short = replace(short, group=min(case.group, 2) if case.group == 4 else case.group)
    check_prompt(choose(spec, "triton", CPU, case.dtype), spec, short)


@pytest.mark.parametrize("name", few(CASES, "causal", "padded window", "softcap", "bfloat16"))
def test_columns(name: str) -> None:
    check(FEW, CASES[name])


@pytest.mark.parametrize("name", few(["sinks", "padded window", "three forwards of a window"], "padded window"))
@pytest.mark.parametrize("text", [WATCH, LOGITS], ids=["attn", "logit"])
def test_every_rule(text: str, name: str) -> None:
    check(text, CASES[name])


@pytest.mark.parametrize("rope", ["half", "partial"])
def test_keys_that_have_turned(rope: str) -> None:
    """Of a prompt's second block attention sees keys at their ranks, and so do its statistics."""
    body = "param budget = 12\nscore mean(attn)\nkeep top 3 by std(attn)\npositions compact\nprefill blocks of 16"
    case = replace(test_statements.PADDED, kv_heads=1, prompt=40, steps=0, rope=rope)
    total = compare(policy_of(body), spec_of(body), "triton", case)
    assert total.steps > 0 and not total.failures, "\n".join(total.failures)


def test_a_prompt_of_more_than_32_bits_count() -> None:
    """Who asks holds gigabytes of queries; here are none."""
    with pytest.raises(KvdslError, match=r"700,000 tokens at once are too long .*`prefill_chunk_size`"):
        refuse_far(torch.empty(1, 32, 700_000, 128, device="meta"), 32)
    refuse_far(torch.empty(1, 32, 500_000, 128, device="meta"), 32)
    refuse_far(torch.empty(1, 700_000, 32, 128, device="meta").transpose(1, 2), 32)
