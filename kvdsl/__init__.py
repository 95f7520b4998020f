"""kvdsl: a small language for the KV-cache policies of large language models, and its compiler.

`kvdsl.load("roco")` compiles a shipped policy (or a .kv file) and gives its cache class.
"""

from kvdsl.loading import load  # light: it imports torch only when a policy is loaded

__version__ = "0.1.0"
__all__ = ["__version__", "load"]
