"""Check the policies and settings of a command before it loads torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdsl.errors import KvdslError
from kvdsl.memory import OPTIONS

if TYPE_CHECKING:
    from kvdsl.ir.nodes import Policy


def checked_policy(name: str, settings: Mapping[str, str], what: str) -> Policy:
    """Return the policy of a command, which gives it no values per token.

    Args:
        settings: defaults of params to change, and options of `kvdsl.memory`.
        what: the command, as the subject of an error.

    Raises:
        DiagnosticError: if there is no such policy, or if it has errors.
        KvdslError: if it does not support an option, or needs a value from its caller.
    """
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.explain.facts import laid_out

    params = {key: value for key, value in settings.items() if key not in OPTIONS}
    policy = analyse(find_policy(name), settings=params).policy
    policy = laid_out(policy, **{key: settings[key] for key in OPTIONS if key in settings})
    refuse_required(policy.name, [(one.name, one.default) for one in policy.given], what)
    return policy


def settings_by_policy(names: Sequence[str], settings: Mapping[str, str], what: str) -> dict[str, dict[str, str]]:
    """Return, for each policy, those of the settings that it has.

    Raises:
        DiagnosticError, KvdslError: as `checked_policy`, also for a setting that no policy has.
    """
    has: dict[str, set[str]] = {}
    for name in names:
        policy = checked_policy(name, {}, what)
        has[name] = {*(param.name for param in policy.params), *OPTIONS} - (
            {"rope"} if policy.positions != "compact" else set()
        )
    unknown = {key for key in settings if not any(key in own for own in has.values())}
    own = {name: {key: settings[key] for key in settings if key in has[name] | unknown} for name in names}
    for name in names if settings else ():
        checked_policy(name, own[name], what)
    return own


def refuse_required(policy: str, given: Iterable[tuple[str, object]], what: str) -> None:
    """Raise KvdslError if a policy needs a value that this caller cannot provide.

    Args:
        policy: its name.
        given: the policy's inputs from its caller, with their defaults.
        what: the command, as the subject of an error.
    """
    wanted = [name for name, default in given if default is None]
    if wanted:
        raise KvdslError(
            f"{what} passes no values to policies, and {policy} needs `{wanted[0]}` from its caller: write a default in the policy, "
            f"`input {wanted[0]} = 0`, or pass it in Python, `{policy}Cache(model, {wanted[0]}=f)`"
        )
