"""StreamingLLM: Keeps the first tokens, which attention sinks into, and the most recent ones.

Made by kvdsl 0.1.0 from streaming_llm.kv (913eff0e7da2). Do not edit: run `kvdsl compile streaming_llm.kv`.
"""

from .cache import StreamingLLMCache

__all__ = ["StreamingLLMCache"]
