"""Policies as a command line asks for them: what is wrong with them is told before torch is loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.ir.nodes import Policy

_MEMORY = ("storage", "rope")


def asked(name: str, settings: Mapping[str, str], what: str) -> Policy:
    """A policy that nobody gives anything to.

    Args:
        settings: defaults of params to change, and `storage` and `rope`.
        what: who asks, as the subject of a sentence.

    Raises:
        DiagnosticError: if there is no such policy, or if it has errors.
        KvdslError: if it cannot lie in memory so, or needs something from its caller.
    """
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.diagnostics import DiagnosticError
    from kvdsl.explain.facts import laid_out

    params = {key: value for key, value in settings.items() if key not in _MEMORY}
    analysis = analyse(find_policy(name), settings=params)
    if not analysis.ok:
        raise DiagnosticError(analysis.diagnostics)
    policy = laid_out(analysis.policy, **{key: settings[key] for key in _MEMORY if key in settings})
    refuse_required(policy.name, [(one.name, one.default) for one in policy.given], what)
    return policy


def settled(names: Sequence[str], settings: Mapping[str, str], what: str) -> dict[str, dict[str, str]]:
    """Of several policies the settings that each one has.

    Raises:
        DiagnosticError, KvdslError: as `asked`; and if a setting is nobody's.
    """
    has: dict[str, set[str]] = {}
    for name in names:
        policy = asked(name, {}, what)
        has[name] = {*(param.name for param in policy.params), "storage", *(["rope"] * (policy.positions == "compact"))}
    nobodys = {key for key in settings if not any(key in own for own in has.values())}
    own = {name: {key: settings[key] for key in settings if key in has[name] | nobodys} for name in names}
    for name in names if settings else ():
        asked(name, own[name], what)
    return own


def refuse_required(policy: str, given: Iterable[tuple[str, object]], what: str) -> None:
    """Raise KvdslError where nobody can give what a policy cannot do without.

    Args:
        policy: its name.
        given: what it asks its caller for, with the defaults.
        what: who asks, as the subject of a sentence.
    """
    wanted = [name for name, default in given if default is None]
    if wanted:
        raise KvdslError(
            f"{what} gives a policy nothing, and {policy} needs `{wanted[0]}` from its caller: write a default in the policy, "
            f"`input {wanted[0]} = 0`, or give it in Python, `{policy}Cache(model, {wanted[0]}=f)`"
        )
