"""Under transformers' own tensor parallelism every process keeps what the single process keeps for its heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hf import zoo
from tests.hf.tensor_parallel_worker import NAMES, results

pytestmark = pytest.mark.nightly

RANKS = 2
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_equal_one(tmp_path: Path) -> None:
    model = zoo.make("Llama", num_attention_heads=8, num_key_value_heads=4)
    model.save_pretrained(tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    worker = [str(Path(__file__).with_name("tensor_parallel_worker.py")), str(tmp_path)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*launch, *worker], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = results(model)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for name in NAMES:
        for rank in ranks:
            assert rank[name]["tokens"] == alone[name]["tokens"], name
        for layer, expected in enumerate(alone[name]["kept"]):
            for row, heads in enumerate(expected):
                together = [head for rank in ranks for head in rank[name]["kept"][layer][row]]
                assert len(ranks[0][name]["kept"][layer][row]) == len(heads) // RANKS
                assert together == heads, f"{name}, layer {layer}, row {row}"
