"""kvdsl: a small language for the KV-cache policies of large language models, and its compiler.

`kvdsl.load("roco")` compiles a shipped policy (or a .kv file) and gives its cache class, `kvdsl.compile("kv 1 ...")` does so for a
policy in a string. All errors are `kvdsl.KvdslError`; what is wrong with a policy's source is a `kvdsl.DiagnosticError`.
"""

from kvdsl.diagnostics import DiagnosticError
from kvdsl.errors import KvdslError
from kvdsl.loading import compile, load, load_model  # light: torch is imported only when a policy is loaded

__version__ = "0.1.0"
__all__ = ["DiagnosticError", "KvdslError", "__version__", "compile", "load", "load_model"]
