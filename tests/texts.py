"""Policies of which a test writes some statements: compiled once a process, whoever asks."""

from __future__ import annotations

from functools import cache

import kvdsl
from kvdsl.compiler import compile_text
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from kvdsl.runtime.spec import PolicySpec


@cache
def spec_of(body: str, edition: int = 1) -> PolicySpec:
    """The package of a policy `P` of these statements."""
    spec: PolicySpec = kvdsl.compile(_text(body, edition)).spec
    return spec


@cache
def policy_of(body: str, edition: int = 1) -> Policy:
    """The same as the interpreter has it, with its columns."""
    return add_columns(compile_text(_text(body, edition)).policy)


def _text(body: str, edition: int) -> str:
    return f'kv {edition}\npolicy P {{\n"a test"\n{body}\n}}\n'
