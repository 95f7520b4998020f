"""StreamingLLM: Keeps the first tokens, which are attention sinks, and the most recent ones, at positions counted inside the cache.

Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import StreamingLLMCache

__all__ = ["StreamingLLMCache"]
