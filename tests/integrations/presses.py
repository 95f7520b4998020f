"""kvpress's presses that a policy of kvdsl does the same as, and the params under which it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Counterpart:
    """A press, and what a policy is given to do the same.

    Attributes:
        press: from the module kvpress and a compression ratio.
        settings: of the policy, from its budget; what is not named is by default.
        attention: what the press needs the model to compute it with.
        supplied: from the press, what the policy asks its caller for.
    """

    press: Callable[[Any, float], Any]
    settings: Callable[[int], dict[str, float]] = field(default=lambda budget: {})
    attention: str = "sdpa"
    supplied: Callable[[Any], dict[str, Callable[[Any, Any], Any]]] = field(default=lambda press: {})


def _kvzap(kvpress: Any, ratio: float) -> Any:
    """With networks of its own kind, of random weights: those that were trained lie on a hub."""
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

    class Press(kvpress.KVzapPress):  # type: ignore[misc]
        def post_init_from_model(self, model: Any) -> None:
            config = model.config
            heads, layers = config.num_key_value_heads, config.num_hidden_layers
            self.kvzap_model = KVzapModel(
                KVzapConfig(input_dim=config.hidden_size, output_dim=heads, hidden_dim=16, n_modules=layers)
            )

    return Press(ratio)


def _kvzap_says(press: Any) -> dict[str, Callable[[Any, Any], Any]]:
    return {"importance": lambda module, hidden: press.kvzap_model.layers[module.layer_idx](hidden).transpose(1, 2)}


def _criticalkv(kvpress: Any, ratio: float) -> Any:
    return kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5))


def _criticaladakv(kvpress: Any, ratio: float) -> Any:
    return kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio, window_size=4, kernel_size=5))


def _projected(press: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """Norms behind the output projection, as kvpress finds them."""

    def norms(module: Any, hidden: Any) -> Any:
        values = module.v_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        from kvpress import CriticalKVPress

        return CriticalKVPress.vwl1norm(values, module)

    return {"projected": norms}


def _finch(kvpress: Any, ratio: float) -> Any:
    press = kvpress.FinchPress(compression_ratio=ratio)
    press.window_size, press.delimiter_token_id = 12, -1  # the window is given, so that no token has to stand before it
    return press


COUNTERPARTS: dict[str, Counterpart] = {
    "knorm_once": Counterpart(lambda kvpress, ratio: kvpress.KnormPress(ratio)),
    "streaming_llm_once": Counterpart(lambda kvpress, ratio: kvpress.StreamingLLMPress(ratio)),
    "tova_once": Counterpart(lambda kvpress, ratio: kvpress.TOVAPress(ratio)),
    "observed_once": Counterpart(lambda kvpress, ratio: kvpress.ObservedAttentionPress(ratio), attention="eager"),
    "keydiff": Counterpart(lambda kvpress, ratio: kvpress.KeyDiffPress(ratio)),
    "keydiff_blocks": Counterpart(
        lambda kvpress, ratio: kvpress.BlockPress(kvpress.KeyDiffPress(ratio), block_size=4), lambda budget: {"block": 4}
    ),
    "key_rerotation": Counterpart(lambda kvpress, ratio: kvpress.KeyRerotationPress(kvpress.KnormPress(ratio))),
    "criticalkv_projected": Counterpart(_criticalkv, lambda budget: {"window": 8}, supplied=_projected),
    "criticaladakv": Counterpart(_criticaladakv, lambda budget: {"window": 4}, supplied=_projected),
    "kvzap_once": Counterpart(_kvzap, supplied=_kvzap_says),
    # Four partitions of 15 are ranked: at every ratio whole ranks of them leave, since those of one rank tie.
    "lagkv": Counterpart(
        lambda kvpress, ratio: kvpress.LagKVPress(ratio, n_sink=4, lag_size=15), lambda budget: {"sinks": 4, "lag": 15}
    ),
    "expected_attention": Counterpart(lambda kvpress, ratio: kvpress.ExpectedAttentionPress(ratio)),
    "capkv": Counterpart(lambda kvpress, ratio: kvpress.CapPress(ratio)),
    # Whole chunks: a last one that is not whole attends to its padding in kvpress.
    "non_causal": Counterpart(
        lambda kvpress, ratio: kvpress.NonCausalAttnPress(ratio, chunk_size=16), lambda budget: {"chunk": 16}
    ),
    "finch": Counterpart(_finch, lambda budget: {"question": 12}),
    "cur": Counterpart(lambda kvpress, ratio: kvpress.CURPress(ratio)),
    "chunkkv": Counterpart(
        # Without pooling; a window of whole chunks, whose scores kvpress raises.
        lambda kvpress, ratio: kvpress.ChunkKVPress(
            kvpress.SnapKVPress(ratio, window_size=10, kernel_size=1), chunk_length=10
        ),
        lambda budget: {"chunk": 10, "window": 10},
    ),
    "snapkv_kvpress": Counterpart(
        lambda kvpress, ratio: kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5), lambda budget: {"window": 8}
    ),
    "adakv_kvpress": Counterpart(
        lambda kvpress, ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)),
        lambda budget: {"window": 8},
    ),
    "pyramidkv_kvpress": Counterpart(
        lambda kvpress, ratio: kvpress.PyramidKVPress(ratio, window_size=8, kernel_size=5, beta=2),
        lambda budget: {"window": 8, "beta": 2},
    ),
}
"""By the policy's stem; what a ratio alone says. The other presses have tests of their own in `test_presses.py`."""

OTHERS = (
    "knorm_chunks",
    "knorm_then_keydiff",
    "per_layer",
    "knorm_decoding",
    "prefill_decoding",
    "lu_kv",
    "duo_attention",
    "q_filters",
    "leverage_score",
    "compactor",
    "expected_attention_stats",
    "fast_kvzip",
    "kvzip",
    "dms",
    "kvzap_threshold",
    "simlayerkv",
    "compression_ratio_decoding",
)
"""Those that are compared there otherwise."""
