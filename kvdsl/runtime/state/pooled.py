"""Keys and values that lie otherwise than slot after slot: in one pool of each, that all rows of a batch share.

What lies where is each layout's own (`blocks` and `flat`, beside); positions, columns and ranks stay by slot, because they are
small, and who leaves does not depend on where things lie. So do the rotated halves of `rope cached`.
"""

from __future__ import annotations

from torch import Tensor

from kvdsl.runtime.state.slots import SlotState, taken
from kvdsl.runtime.state.tensors import Declared

POOLS = {"keys": "key_pool", "values": "value_pool"}
"""What lies in pools, and the name of its pool."""


class PooledState(SlotState):
    """`SlotState` with keys and values in pools.

    Tensors instead of `keys` and `values`:
        key_pool [..., key_dim], value_pool [..., value_dim]: the model's dtype. A layout says what their other dimensions are.

    Reading `keys` or `values` gathers all slots; what is there of one that has no place in the pools means nothing, as in free slots.
    """

    LAYOUT = tuple(Declared(pool, batch=None) for pool in POOLS.values())

    key_pool: Tensor
    value_pool: Tensor

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, key_dim]; a copy."""
        return self._gathered(self.key_pool)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, value_dim]; a copy."""
        return self._gathered(self.value_pool)

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """See `SlotState.stored`: the pools."""
        return self.key_pool, self.value_pool

    def select_rows(self, rows: Tensor) -> None:
        """See `SlotState.select_rows`; what the rows have in the pools is copied."""
        if not self.allocated:
            return
        rows = rows.to(self.position.device)
        dense = {name: getattr(self, name).index_select(0, rows) for name in POOLS}
        super().select_rows(rows)
        self._lay_out(dense)

    # -- a layout's own ------------------------------------------------------------------------------------------------

    def _place(self, kept: dict[str, Tensor], order: Tensor | None) -> None:
        """See `SlotState._place`."""
        if order is None:
            self._grow(kept["position"] >= 0)
        else:
            self._lay_out({name: taken(name, kept[name], order) for name in POOLS})

    def _gathered(self, pool: Tensor) -> Tensor:
        """All slots, [batch, kv_heads, slots, dim], slot after slot in memory."""
        raise NotImplementedError

    def _lay_out(self, dense: dict[str, Tensor]) -> None:
        """Place `keys` and `values` of the first slots, [batch, kv_heads, any, dim], as far as `position` says that they hold a token."""
        raise NotImplementedError

    def _grow(self, held: Tensor) -> None:
        """Have places for slots that were added. `held`: bool [batch, kv_heads, slots], which ones held a token, of those before."""
        raise NotImplementedError
