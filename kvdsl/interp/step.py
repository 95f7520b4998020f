"""The result of one forward for one head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask


@dataclass(frozen=True)
class Attended:
    """The attention of a forward over the n slots that are live then; see `Step`."""

    out: Array
    attn: Array
    logit: Array
    selected: Mask | None = None
    chosen: Mask | None = None


@dataclass(frozen=True)
class Step:
    """The result of one forward. All but `out` is over the n slots that are live before the settle, the new ones last.

    Attributes:
        position: [n].
        score: [n], or None for a policy without one.
        by: per keep line what it ranks or filters by, [n], or None.
        protected: [n] bool.
        victims: indices of the evicted slots, the first victim first.
        columns: the state columns, [n] each and [n, N] for a ring; empty if the head keeps its history.
        out: [G, Dv] of a decode step, [L, G, Dv] of a prefill.
        attn, logit: [n] of the last query, reduced over the group; 0 and -inf for slots that it does not attend to.
        selected: [n] the slots that the query attended to, [G, n] under `group each`; None for everything, and in a prompt.
        chosen: the query's selection for the layers above, shaped like `selected`; None in other layers.
        earlier: earlier settles of the same forward: to make room under `cap hard`, or after a prompt's blocks.
    """

    position: Indices
    score: Array | None
    by: tuple[Array | None, ...]
    protected: Mask
    victims: Indices
    columns: dict[str, Array]
    out: Array = field(default_factory=lambda: np.zeros(0))
    attn: Array = field(default_factory=lambda: np.zeros(0))
    logit: Array = field(default_factory=lambda: np.zeros(0))
    selected: Mask | None = None
    chosen: Mask | None = None
    earlier: tuple[Step, ...] = ()

    def with_attended(self, attended: Attended) -> Step:
        """Return the step with a forward's attention."""
        return replace(self, **vars(attended))

    @property
    def picked(self) -> Indices:
        """The positions that some query head selected, for itself or the layers above; all without a selection."""
        mask = self.selected if self.chosen is None else self.chosen
        return self.position if mask is None else self.position[mask.reshape(-1, len(self.position)).any(axis=0)]

    @property
    def reads(self) -> tuple[Indices, ...]:
        """The positions that the query attended to, under `group each` those of each query head."""
        mask = self.selected
        return (
            (self.position,) if mask is None else tuple(self.position[own] for own in mask.reshape(-1, len(self.position)))
        )

    @property
    def evicted(self) -> Indices:
        """The positions of the tokens evicted in this forward, the first victim first."""
        return np.concatenate([*(step.evicted for step in self.earlier), self.position[self.victims]])

    @property
    def kept(self) -> Indices:
        """The positions of the remaining tokens, ascending."""
        return np.setdiff1d(self.position, self.evicted)
