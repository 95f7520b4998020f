"""Experiment 6: vLLM on a model of Llama-3-8B's shape with random weights, with and without a policy, in equal bytes of cache.

Each engine is a process of its own (`scripts/serving/offline_engine.py`), whose first load, a short one, is not timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.gpu.setting import ROOT, Lines, Served, Setting

WAYS: tuple[tuple[str, str], ...] = (("full", "FULL_AND_PIECEWISE"), ("h2o", "PIECEWISE"), ("full", "PIECEWISE"))
"""Policies and kinds of CUDA graphs; vLLM captures no whole step under a policy."""


def run(setting: Setting, lines: Lines) -> int:
    """Tokens a second of every way, the comparison that counts first."""
    lines.tell(**setting.environment(), vllm=find_spec("vllm") is not None)
    if find_spec("vllm") is None:
        print("vllm is not installed")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(setting.sizes.served.config))
        for policy, graphs in WAYS:
            try:
                found: dict[str, Any] = _asked(folder, policy, graphs, setting.sizes.served)
            except Exception as error:
                found, failed = {"error": f"{type(error).__name__}: {error}"[-1000:]}, failed + 1
            lines.tell(policy=policy, graphs=graphs, **found)
            print(policy, graphs, found, flush=True)
    return 1 if failed else 0


def _asked(folder: str, policy: str, graphs: str, served: Served) -> dict[str, Any]:
    """Seconds of all requests, and tokens a second."""
    told = {
        "engine": "vllm", "model": folder, "dtype": "bfloat16", "longest": served.prompt + served.answer + 16,
        "cache_bytes": served.cache_bytes, "vocabulary": served.config["vocab_size"],
        "policy": None if policy == "full" else {"policy": policy, "budget": served.budget},
        "more": {"load_format": "dummy", "skip_tokenizer_init": True, "compilation_config": {"cudagraph_mode": graphs}},
    }  # fmt: skip
    load = {"prompt": served.prompt, "new": served.answer, "requests": served.requests, "seed": 1}
    asked = [told, load | {"new": min(8, served.answer)}, load]
    command = [sys.executable, str(ROOT / "scripts" / "serving" / "offline_engine.py")]
    done = subprocess.run(
        command, input="".join(json.dumps(one) + "\n" for one in asked), capture_output=True, text=True, check=False
    )
    answers = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    if len(answers) < 2:
        raise RuntimeError((done.stdout + done.stderr)[-900:])
    return answers[1] | {"tokens_per_s": round(served.requests * served.answer / answers[1]["seconds"], 1)}
