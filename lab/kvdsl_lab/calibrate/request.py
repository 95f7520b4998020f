"""What a policy's `tensor` lines ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy, Tensor
from kvdsl_lab.calibrate.statistics import Statistic


@dataclass(frozen=True)
class Wanted:
    """A tensor of a policy, and what it is to hold."""

    tensor: Tensor
    statistic: Statistic


def wanted(policy: Policy, chosen: Mapping[str, str], known: Mapping[str, Statistic]) -> tuple[Wanted, ...]:
    """What each of a policy's tensors is to hold: what was chosen, or else what its name means.

    Args:
        chosen: names of statistics by names of tensors.
        known: the statistics by name.

    Raises:
        KvdslError: if the policy has no tensors, not the named ones, or one that nobody can tell; with what to do.
    """
    if not policy.tensors:
        raise KvdslError(f"{policy.name} reads no tensors: only a policy with a `tensor` line has something to calibrate")
    names = [tensor.name for tensor in policy.tensors]
    for name, statistic in chosen.items():
        if name not in names:
            there = did_you_mean(name, names) or f"it has {listed(names, 'and')}"
            raise KvdslError(f"{policy.name} has no tensor `{name}`; {there}")
        if statistic not in known:
            there = did_you_mean(statistic, known) or f"there are {listed(known, 'and')}"
            raise KvdslError(f"there is no statistic `{statistic}`; {there}")
    return tuple(_fitting(tensor, _statistic(tensor, chosen, known)) for tensor in policy.tensors)


def _statistic(tensor: Tensor, chosen: Mapping[str, str], known: Mapping[str, Statistic]) -> Statistic:
    if tensor.name in chosen:
        return known[chosen[tensor.name]]
    meant = [statistic for statistic in known.values() if tensor.name in statistic.names]
    for statistic in sorted(meant, key=lambda one: set(one.axes) != set(tensor.axes)):
        return statistic
    fitting = [one.name for one in known.values() if set(one.axes) == set(tensor.axes)]
    example = f"`--tensor {tensor.name}={(fitting or list(known))[0]}`"
    raise KvdslError(f"nobody knows what `{tensor.name}` is to hold: say {example}; statistics are {listed(known, 'and')}")


def _fitting(tensor: Tensor, statistic: Statistic) -> Wanted:
    if set(tensor.axes) != set(statistic.axes):
        raise KvdslError(
            f"`{tensor.name}` is over [{', '.join(tensor.axes)}], but {statistic.name} is over [{', '.join(statistic.axes)}]: change the "
            f"`tensor` line, or choose another with `--tensor {tensor.name}=...`"
        )
    return Wanted(tensor, statistic)
