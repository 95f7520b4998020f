"""A policy as data (`facts`) and in words (`words`). Imports nothing of the runtime."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number of a key or a value."""
