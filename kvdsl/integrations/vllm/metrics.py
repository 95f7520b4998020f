"""kvdsl's numbers beside vLLM's own under `/metrics`: a logger that vLLM's servers load (entry point `vllm.stat_logger_plugins`)."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from kvdsl.integrations.vllm.ledger import Ledger
from kvdsl.integrations.vllm.settings import asked

_LABELS = ("model_name", "engine")

EVICTED = Counter("kvdsl:tokens_evicted", "Tokens that the policy has evicted, counted in each layer and KV head.", _LABELS)
PAGES = Gauge("kvdsl:pages_in_use", "Pages that requests hold, one in each layer.", _LABELS, multiprocess_mode="mostrecent")
BYTES = Gauge(
    "kvdsl:request_bytes",
    "Bytes of the cache that a request takes, all layers together, whatever its length.",
    _LABELS,
    multiprocess_mode="mostrecent",
)


class Metrics(StatLoggerBase):  # type: ignore[misc]
    """One engine's. It sleeps where the configuration asks for no policy."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._asked = asked(vllm_config) is not None
        self._engine = engine_index
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._ledger: Ledger | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """A step has been answered: say what it has come to."""
        if not self._asked or scheduler_stats is None:
            return
        self._ledger = self._ledger or Ledger.find(self._engine)
        if self._ledger is None:  # the engine runs on another machine
            return
        sizes = self._ledger.sizes
        EVICTED.labels(*self._labels).inc(self._ledger.take())
        BYTES.labels(*self._labels).set(sizes.request_bytes)
        # The first block is nobody's, which vLLM leaves out of what it calls usage.
        PAGES.labels(*self._labels).set(round(scheduler_stats.kv_cache_usage * (sizes.blocks - 1)) * sizes.layers)

    def log_engine_initialized(self) -> None:
        """There is nothing to say yet."""
