"""kvdsl's numbers beside vLLM's own under `/metrics`: a logger that vLLM's servers load (entry point `vllm.stat_logger_plugins`)."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from kvdsl.integrations.vllm.ledger import Ledger
from kvdsl.integrations.vllm.settings import asked

_LABELS = ("model_name", "engine")

EVICTED = Counter("kvdsl:tokens_evicted", "Tokens that the policy has evicted, counted in each layer and KV head.", _LABELS)
PAGES = Gauge(
    "kvdsl:pages_in_use",
    "Pages that requests hold, one in each layer of each process.",
    _LABELS,
    multiprocess_mode="mostrecent",
)
BYTES = Gauge(
    "kvdsl:request_bytes",
    "Bytes of the cache that a request takes, all layers and processes together, whatever its length; that its answer takes, where prompts "
    "are shared.",
    _LABELS,
    multiprocess_mode="mostrecent",
)


class Metrics(StatLoggerBase):  # type: ignore[misc]
    """One engine's. It stays inactive without a policy in the configuration."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        settings = asked(vllm_config)
        self._asked, self._in_pages = settings is not None, settings is not None and not settings.answers
        self._engine = engine_index
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._workers = vllm_config.parallel_config.tensor_parallel_size
        self._ledgers: list[Ledger] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Report the numbers after a step."""
        if not self._asked or scheduler_stats is None:
            return
        if not self._ledgers and not self._find():  # the engine runs on another machine
            return
        sizes = [ledger.sizes for ledger in self._ledgers]
        if all(one.counted for one in sizes):
            EVICTED.labels(*self._labels).inc(sum(ledger.take() for ledger in self._ledgers))
        BYTES.labels(*self._labels).set(sum(one.request_bytes for one in sizes))
        if not self._in_pages:
            return
        # The first block belongs to no request, and vLLM's usage leaves it out.
        requests = round(scheduler_stats.kv_cache_usage * (sizes[0].blocks - 1))
        PAGES.labels(*self._labels).set(requests * sum(one.layers for one in sizes))

    def _find(self) -> bool:
        """Whether all workers of the engine have written their numbers."""
        found = [Ledger.find(self._engine, rank) for rank in range(self._workers)]
        self._ledgers = [ledger for ledger in found if ledger is not None]
        if len(self._ledgers) < self._workers:
            self._ledgers = []
        return bool(self._ledgers)

    def log_engine_initialized(self) -> None:
        """Do nothing: there are no numbers yet."""
