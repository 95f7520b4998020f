"""kvdsl inside of other people's packages.

- `prompts`: what a policy keeps of a prompt, for caches that are not kvdsl's.
- `kvpress`: a .kv policy as a press.
- `notebook`: `%%kv` in IPython.
"""
