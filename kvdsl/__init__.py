"""kvdsl: a small language for the KV-cache policies of large language models, and its compiler.

`kvdsl.load("roco")` compiles a shipped policy (or a .kv file) and returns its cache class, `kvdsl.compile("kv 1 ...")` compiles a
policy from a string, and `@kvdsl.policy` makes a policy of a function (`kvdsl.lang`). `kvdsl.chat(model, tokenizer, cache)` marks
roles and turns in a cache. All errors are `kvdsl.KvdslError`; errors in a policy's source are `kvdsl.DiagnosticError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvdsl.abi import VERSION as __version__
from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.diagnostics import DiagnosticError
    from kvdsl.generation.chat import chat
    from kvdsl.generation.spans import spans_of
    from kvdsl.lang.policies import policy
    from kvdsl.loading import compile, load, load_model

__all__ = ["DiagnosticError", "KvdslError", "__version__", "chat", "compile", "load", "load_model", "policy", "spans_of"]

_LATER = {
    "DiagnosticError": "kvdsl.diagnostics",
    "chat": "kvdsl.generation.chat",
    "compile": "kvdsl.loading",
    "load": "kvdsl.loading",
    "load_model": "kvdsl.loading",
    "policy": "kvdsl.lang.policies",
    "spans_of": "kvdsl.generation.spans",
}
"""The modules of names that are imported at their first use; `kvdsl --help` needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module `kvdsl` has no attribute `{name}`")
    globals()[name] = getattr(import_module(_LATER[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext kvdsl` in a notebook: `%%kv` compiles the policy in its cell."""
    from kvdsl.integrations.notebook import register

    register(shell)
