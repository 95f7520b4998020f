"""What vLLM's pages cannot hold is refused before a server starts; needs no vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm import releases
from kvdsl.integrations.vllm.refusals import refuse_configuration, refuse_layer, refuse_layers, refuse_policy
from kvdsl.integrations.vllm.settings import Settings, parsed
from kvdsl.runtime.state.slots import SlotState
from tests.texts import spec_of

CAPPED = "param budget = 12\nscore sum(attn)\ncap hard"


@pytest.mark.parametrize(
    "lazily", ["trigger overflow >= 2", "trigger overflow >= 0", "trigger overflow >= 4\nslack 2\nmax_drop 3"]
)
def test_a_prompt_may_not_leave_more_than_a_page_holds(lazily: str) -> None:
    with pytest.raises(KvdslError, match="under `cap hard` a prompt of P may leave more than a page holds"):
        refuse_policy(SlotState(spec_of(f"{CAPPED}\n{lazily}"), {}))


def test_what_requests_do_not_say() -> None:
    policy = spec_of("param budget = 12\ninput tool from spans\ninput worth = 0\nscore where(tool, worth, turn + turns)")
    with pytest.raises(KvdslError, match="asks its caller for `worth`"):
        refuse_policy(SlotState(policy, {}))


@pytest.mark.parametrize("other", ["", "trigger overflow >= 3\nslack 2\nmax_drop 3", "slack 4\nmax_drop 2"])
def test_what_leaves_no_more_is_served(other: str) -> None:
    refuse_policy(SlotState(spec_of(f"{CAPPED}\n{other}"), {}))


def test_a_budget_that_holds_less_than_is_kept() -> None:
    """It is not said to depend on the prompt."""
    with pytest.raises(KvdslError, match=r"H2O protects 20 tokens .* but its budget holds 12; raise the budget"):
        refuse_policy(Settings("h2o", (("budget", 12), ("recent", 20))).state(0, 1))


@pytest.mark.parametrize("budget", [2.5, math.inf, -3])
def test_a_budget_that_is_none(budget: float) -> None:
    with pytest.raises(KvdslError, match="`budget` of H2O"):
        Settings("h2o", (("budget", budget),)).state(0, 1)


def test_a_ratio_is_a_rate() -> None:
    """JSON has `1` for all of the prompt."""
    with pytest.raises(KvdslError, match=r"`budget` of H2O is 1.0, a ratio of each prompt"):
        refuse_policy(parsed({"policy": "h2o", "ratio": 1}).state(0, 1))
    with pytest.raises(KvdslError, match="`budget` and `ratio` of H2O are both given"):
        parsed({"policy": "h2o", "ratio": 0.5, "budget": 12}).state(0, 1)
    with pytest.raises(KvdslError, match="Full has no param `budget` that a `ratio` could set"):
        parsed({"policy": "full", "ratio": 0.5}).state(0, 1)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("param budget = 64\nscore sum(attn)\nselect top 32 by sum(q * max(k over page) over dims)\npages 4 + 4 * layer", "`pages`"),
        ("select top 32 by sum(q * k over sketch)\nsketch top 4 + layer dims by abs(q) every 8 queries", "`sketch`"),
        ("param budget = 64\nscore mean(attn over last (8 + 4 * layer) queries)", "`over last N queries`"),
    ],
)  # fmt: skip
def test_what_layers_cannot_have_of_their_own(lines: str, what: str) -> None:
    """A page has one size for all: bounds of more pages than it has room for were written over what lies behind them."""
    spec = spec_of(lines)
    with pytest.raises(KvdslError, match=f"{what} of P differs between layers"):
        refuse_layers([SlotState(spec, {}, layer=layer, layers=4) for layer in range(4)])
    refuse_layers([SlotState(spec, {}, layer=1, layers=4)] * 2)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("param budget = 12\nscore sum(attn)\nwhen decode", "evicts in `decode` only"),
        ("param budget = 12\nscore sum(attn)\nvictims shared by layers", "chooses for other layers"),
        ("param budget = 12\ngiven worth\nscore worth", "asks its caller for `worth`"),
        ("budget prompt / 2\nscore sum(attn)", "depend on the prompt"),
    ],
)
def test_what_has_no_page(policy: str, why: str) -> None:
    with pytest.raises(KvdslError, match=why):
        refuse_policy(SlotState(spec_of(policy), {}))


H2O, AGREED = "param budget = 12\nscore sum(attn)", "param budget = 12\nscore sum(attn)\nvictims shared by heads"


def configuration(**asked: Any) -> Any:
    """What `refuse_configuration` reads of a `VllmConfig` of a model of four KV heads."""
    parts: dict[str, dict[str, Any]] = {
        "": {"speculative_config": None, "kv_transfer_config": None},
        "cache_config": {"cache_dtype": "auto"},
        "model_config": {"is_mm_prefix_lm": False, "is_hybrid": False, "quantization": None},
        "parallel_config": dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"), 1
        )
        | {"use_ubatching": False},
    }  # fmt: skip
    made = {
        name: SimpleNamespace(**{key: asked.pop(key, value) for key, value in part.items()}) for name, part in parts.items()
    }
    assert not asked
    made["model_config"].get_total_num_kv_heads = lambda: 4
    return SimpleNamespace(**vars(made.pop("")), **made)


@pytest.mark.parametrize(
    ("policy", "asked", "why"),
    [
        (H2O, {"speculative_config": SimpleNamespace(method="eagle")}, "by n-grams only, not by `eagle`"),
        (H2O, {"kv_transfer_config": "a connector"}, "leave --kv-transfer-config out"),
        (H2O, {"cache_dtype": "fp8"}, "leave --kv-cache-dtype out"),
        (H2O, {"is_mm_prefix_lm": True}, "have it take text only"),
        (H2O, {"is_hybrid": True}, "layers that are no attention"),
        (f"{H2O}\npositions compact", {"quantization": "gguf"}, "keys of GGUF files in other pairs"),
        (H2O, {"tensor_parallel_size": 3}, "4 KV heads do not divide evenly over 3 processes"),
        (H2O, {"pipeline_parallel_size": 2}, "does not spread layers over processes"),
        (H2O, {"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "leave context parallelism out"),
        (H2O, {"prefill_context_parallel_size": 2}, "leave context parallelism out"),
        (H2O, {"use_ubatching": True}, "serves one batch at a time"),
        (AGREED, {"tensor_parallel_size": 2}, "agree on victims, but tensor parallelism spreads them over 2 processes"),
    ],
)
def test_what_is_not_served_beside_a_policy(policy: str, asked: dict[str, Any], why: str) -> None:
    spec = spec_of(policy)
    refuse_configuration(configuration(), spec)
    with pytest.raises(KvdslError, match=why):
        refuse_configuration(configuration(**asked), spec)


@pytest.mark.parametrize("asked", [{"tensor_parallel_size": 2}, {"quantization": "gguf"}])
def test_what_is_served_beside_a_policy(asked: dict[str, Any]) -> None:
    refuse_configuration(configuration(speculative_config=SimpleNamespace(method="ngram"), **asked), spec_of(H2O))


def test_a_kind_of_a_known_layer_is_unknown() -> None:
    """It attends to something else, as vLLM's layers with sinks of their own do."""

    class Full: ...

    class WithSinks(Full): ...

    refuse_layer(Full(), Full)
    with pytest.raises(KvdslError, match="a layer's cache is vLLM's WithSinks"):
        refuse_layer(WithSinks(), Full)


def test_releases_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones than were tested are refused whatever they have; newer ones unless they have all that kvdsl uses."""
    for version in (f"{releases.RELEASES[0]}.0", f"{releases.RELEASES[-1]}.7+cpu"):
        assert releases.refusal(version) is None
    monkeypatch.setattr(releases, "_missing", lambda: ())
    assert releases.refusal("99.1.0+cpu") is None
    monkeypatch.setattr(releases, "_missing", lambda: ("vllm.one", "vllm.two", "vllm.three"))
    why = releases.refusal("99.1.0+cpu")
    assert why is not None and "99.1.0+cpu has changed what it uses (vllm.one and 2 more): pip install" in why
    monkeypatch.setattr(releases, "_missing", lambda: ())
    with pytest.raises(KvdslError, match=r"kvdsl serves in vLLM 0\.32, this is 0\.9\.2: pip install"):
        releases.refuse_release("0.9.2")
