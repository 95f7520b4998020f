"""StreamingLLM: Keeps the first tokens, which attention sinks into, and the most recent ones, at positions counted inside of the cache.

Made by kvdsl 0.1.0 from streaming_llm.kv (0d35b9aad75b). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import StreamingLLMCache

__all__ = ["StreamingLLMCache"]
