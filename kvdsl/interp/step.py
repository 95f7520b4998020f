"""What one forward did to one head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask


@dataclass(frozen=True)
class Attended:
    """What a forward's queries gave, over the n slots that are live then; as in `Step`."""

    out: Array
    attn: Array
    logit: Array
    selected: Mask | None = None
    chosen: Mask | None = None


@dataclass(frozen=True)
class Step:
    """What one forward did. All but `out` is over the n slots live before the settle, the new ones last.

    Attributes:
        position: [n].
        score: [n], or None for a policy without one.
        by: per keep line what it ranks or chooses by, [n], or None.
        protected: [n] bool.
        victims: indices of the slots that left, the first to leave first.
        columns: the state columns, [n] each and [n, N] of a ring; none where the head keeps its history.
        out: [G, Dv] of a decode step, [L, G, Dv] of a prefill.
        attn, logit: [n] of the last query, reduced over the group; 0 and -inf where it does not attend to the slot.
        selected: [n] what the query attended to, under `group each` [G, n]; None where it attends to everything, or in a prompt.
        chosen: likewise what it chose for the layers above; None where the layer does not.
        earlier: the settles of the same forward before this one: to make room under `cap hard`, or after a prompt's blocks.
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
        """The step of the forward that gave this."""
        return replace(self, **vars(attended))

    @property
    def picked(self) -> Indices:
        """The positions that a query head chose, for itself or the layers above; of a query that does not choose, all."""
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
        """The positions of the tokens that left in this forward, the first to leave first."""
        return np.concatenate([*(step.evicted for step in self.earlier), self.position[self.victims]])

    @property
    def kept(self) -> Indices:
        """The positions of the tokens that stayed, ascending."""
        return np.setdiff1d(self.position, self.evicted)
