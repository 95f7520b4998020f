"""The reference interpreter defines what a policy means, in NumPy and float64, slow and obvious.

An `Interpreter` runs one KV head of one layer of one row, a `Layer` heads that decide together, and a `Text` a row's prompts and the
tokens decoded after each. Every backend is tested against it, so it uses no code of a backend.

    numbers = resolve(policy, {"budget": 64}, prompt=100)
    interpreter = Interpreter(policy, numbers, Call(scaling=0.125))
    head = interpreter.empty(key_dim=64, value_dim=64)
    interpreter.prefill(head, q, k, v)                 # q [L, G, D], k [L, D], v [L, Dv]
    step = interpreter.decode(head, q, k, v)           # q [G, D], k [D], v [Dv]
    step.out, step.score, step.evicted
"""

from kvdsl.interp.attention import Attention, Call, Rope, attend
from kvdsl.interp.head import Head
from kvdsl.interp.layer import Layer
from kvdsl.interp.machine import Interpreter, Step
from kvdsl.interp.numbers import Numbers, resolve, resolve_heads
from kvdsl.interp.settle import overflow, protected, victims
from kvdsl.interp.text import Text

__all__ = [
    "Attention",
    "Call",
    "Head",
    "Interpreter",
    "Layer",
    "Numbers",
    "Rope",
    "Step",
    "Text",
    "attend",
    "overflow",
    "protected",
    "resolve",
    "resolve_heads",
    "victims",
]
