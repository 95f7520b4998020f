"""How the engine runs in these tests: in this process, where its pages can be looked at."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def bound_to_processors(processes: int) -> str:
    """What VLLM_CPU_OMP_THREADS_BIND says of so many: vLLM asks for it where there are fewer NUMA nodes than processes."""
    here = sorted(os.sched_getaffinity(0))
    return "|".join(str(here[rank % len(here)]) for rank in range(processes))
