"""Workers end with the process that they work for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

BEGINS_A_WORKER = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from kvdsl_lab.processes import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 3600).result()
"""


def test_a_worker_ends_when_its_parent_is_killed(tmp_path: object) -> None:
    script = f"{tmp_path}/parent.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(BEGINS_A_WORKER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(600):
        if not _runs(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the worker went on for a minute")


def _runs(process: int) -> bool:
    """Whether it does; of one that has ended nobody may have asked yet."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
