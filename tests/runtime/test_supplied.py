"""What a caller gives of tokens, as backends read it; how it gets there through transformers is tests/hf/test_given.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.refusals import refuse_policy
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.supplied import in_rows, supplied_of
from kvdsl.runtime.torch.backend import TorchBackend
from tests.cli.harness import run

BATCH, HEADS, TOKENS = 2, 3, 5


def spec(*lines: str) -> PolicySpec:
    body = "\n  ".join(("param budget = 4", *lines))
    return kvdsl.compile(f'kv 1\n\npolicy P {{\n  "A test."\n  {body}\n}}\n').spec


def keys(heads: int = HEADS, tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, heads, tokens, 4)


def values(heads: int = HEADS, tokens: int = TOKENS) -> Tensor:
    return torch.randn(BATCH, heads, tokens, generator=torch.Generator().manual_seed(0))


def test_values_lie_in_the_order_of_the_policys_lines() -> None:
    policy, x, y = spec("given x", "given y", "score y - x"), values(), values(1)
    found = in_rows(policy, {"y": y, "x": x}, keys())
    assert torch.equal(found, torch.stack([x, y.expand_as(x)]))


def test_a_process_is_given_its_own_heads_or_all() -> None:
    policy, x = spec("given x", "score x"), values(4)
    for offset in (0, 2):
        of_all = in_rows(policy, {"x": x}, keys(2), head_offset=offset, processes=2)
        own = in_rows(policy, {"x": x[:, offset : offset + 2]}, keys(2), head_offset=offset, processes=2)
        assert torch.equal(of_all[0], x[:, offset : offset + 2])
        assert torch.equal(own, of_all)
    with pytest.raises(KvdslError, match=r"give .* 2 or 1, 5"):
        in_rows(policy, {"x": x}, keys(2))


def test_a_part_of_a_call_has_its_part_of_the_values() -> None:
    key = keys()
    call = AttentionCall(key, key, key, None, 1.0, supplied=values()[None])
    assert torch.equal(call.part(slice(1, 3)).supplied, values()[None, ..., 1:3])


def test_a_call_without_values_has_the_defaults() -> None:
    key = keys()
    call = AttentionCall(key, key, key, None, 1.0)
    found = supplied_of(spec("given x = 0.5", "given y = -1", "score x + y"), call)
    assert found[:, 0, 0, 0].tolist() == [0.5, -1]
    with pytest.raises(KvdslError, match="`y` of P is given by the caller"):
        supplied_of(spec("given x = 0.5", "given y", "score x + y"), call)


def test_what_replaces_a_token_brings_its_own() -> None:
    policy = spec("given x", "score x")
    state, backend, key = SlotState(policy, {}), TorchBackend(), keys(tokens=4)
    backend.prefill(state, AttentionCall(key, key, key, None, 1.0, supplied=values(tokens=4)[None]))
    one, new = keys(tokens=1), values(tokens=1)
    backend.replace(state, torch.full((BATCH, HEADS, 1), 2), AttentionCall(one, one, one, None, 1.0, supplied=new[None]))
    assert torch.equal(state.columns[0, :, :, 2], new[..., 0])
    assert torch.equal(state.columns[0, :, :, 1], values(tokens=4)[..., 1])


@pytest.mark.parametrize("command", [["run"], ["trace"], ["bench", "decode"], ["eval", "ppl", "--policies"]])
def test_commands_that_could_not_give_any_say_so(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.kv"
    policy.write_text('kv 1\n\npolicy Mine {\n  "A test."\n  param budget = 4\n  given x\n  score x\n}\n')
    result = run(capsys, *command, str(policy))
    assert result.code == 2
    assert "Mine needs `x` from its caller: write a default in the policy, `input x = 0`" in result.err


def test_a_policy_whose_values_have_defaults_runs_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mine.kv"
    policy.write_text('kv 1\n\npolicy Mine {\n  "A test."\n  param budget = 40\n  given x = 0\n  score mean(attn) + x\n}\n')
    result = run(capsys, "run", str(policy), "--max-new-tokens", "2", "--backend", "torch", "--json")
    assert result.json()["new_tokens"] == 2


def test_vllms_pages_hold_none() -> None:
    with pytest.raises(KvdslError, match="P asks its caller for `x`, which is not served in vLLM's pages"):
        refuse_policy(SlotState(spec("given x = 0", "score x"), {}))
