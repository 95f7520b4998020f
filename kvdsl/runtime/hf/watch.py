"""What a cache records of its model's forwards and of `generate`, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import speculation
from kvdsl.runtime.hf.text import repeats_rows
from kvdsl.runtime.hf.versions import is_of_tokens, text_config
from kvdsl.runtime.torch.prefill import drop_prompt

if TYPE_CHECKING:
    from kvdsl.runtime.hf.layer import SlotLayer
    from kvdsl.runtime.hf.sync import LayerSync


class Watch:
    """Records the calls with a cache. `forwards` and `generation` find it as the cache's `_watch`.

    Attributes:
        guessing: whether generation with guesses has begun and its first forward is not prepared yet.
        knows_padding: whether the padding of a chunked prompt was checked.
    """

    def __init__(self, sync: LayerSync, layers: Sequence[SlotLayer]) -> None:
        self.guessing = self.knows_padding = False
        self._sync = sync
        self._layers = layers

    @property
    def is_recording(self) -> bool:
        """Whether steps are recorded for undo."""
        return any(layer.record_past for layer in self._layers)

    # -- a forward -----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a forward with the cache runs."""
        return self._sync.running

    def begin_forward(self, ids: Tensor | None, embeddings: Tensor | None, guesses: int | None) -> None:
        """Record a forward's tokens.

        Args:
            ids, embeddings: the new tokens, [batch, tokens], or their embeddings, [batch, tokens, any].
            guesses: how many of the last ones are guesses; None if unknown.

        Raises:
            KvdslError: if the cache has no model, or if the last forward was interrupted.
        """
        self._sync.require_model()
        self._sync.begin_forward(defers=all(map(_can_begin_again, self._layers)))
        self._sync.guesses = guesses
        self.hear_ids(ids)
        self._sync.text.note(ids, embeddings, self._sync.length)

    def hear_ids(self, ids: Tensor | None) -> None:
        """Record token ids if the policy reads them; also while compiling."""
        if "token" in self._layers[0].state.spec.hears:
            self._layers[0].supplying.ids = ids

    def hear_positions(self, module: nn.Module, positions: Tensor | None) -> None:
        """Record position ids if the module is the text model and the policy needs them."""
        model = self._sync.model
        if self._layers[0].state.spec.compact and model is not None and module.config is text_config(model):
            self._sync.counting.heard = positions

    def begins_again(self) -> bool:
        """Whether the forward must run again because numbers are not finite or too large; everything is ready for it then."""
        if self._sync.is_right():
            return False
        for layer in self._layers:
            drop_prompt(layer.state)
            layer.counted = 0
        self._sync.begin_again()
        return True

    def stop_forward(self) -> None:
        """Record that the forward ended or failed."""
        self._sync.stop_forward()

    def end_forward(self, module: nn.Module, *, by_its_name: bool) -> None:
        """Check a completed forward.

        Args:
            by_its_name: whether the cache was passed under this release's name for it.

        Raises:
            KvdslError: unless every managed layer ran once.
        """
        self._sync.end_forward(module, by_its_name)

    # -- generation ----------------------------------------------------------------------------------------------------

    def check_mask(self, mask: Any) -> None:
        """Raise KvdslError if the mask of the whole text hides cached tokens."""
        if is_of_tokens(mask):
            self._layers[0].check_mask(mask, one_token=False)

    def check_text(self, ids: Tensor | None, embeddings: Tensor | None) -> None:
        """Raise KvdslError if the whole text, as in `begin_forward`, does not continue the cached one."""
        text, length = self._sync.text, self._sync.length
        at = text.differs(ids, embeddings, length)
        if at is None:
            return
        rows = text.continued_rows(ids, embeddings, length)
        if None not in rows:
            raise KvdslError(
                f"this text continues other rows of the cache than its own, which differ, as beam search and several returned sequences "
                f"leave them: call `cache.batch_select_indices(torch.tensor({rows}))` first, so that every row holds its text"
            )
        if repeats_rows(ids, embeddings):
            raise KvdslError(
                f"this text does not continue the cached one, they differ in token {at}: beam search does not always leave the text that "
                f"it returns in the cache, so call `cache.reset()` and pass the whole text, or generate without beams; and call "
                f"`cache.reset()` before an unrelated prompt"
            )
        raise KvdslError(
            f"this text does not continue the cached one, they differ in token {at}: call `cache.reset()` before an unrelated "
            f"prompt, and go on with what `generate` returned as token ids, because text that is tokenized again may come out "
            f"otherwise"
        )

    def check_whole(self, ids: Tensor | None, embeddings: Tensor | None, columns: int) -> None:
        """Check a whole text that will run, as in `begin_forward`, followed by guesses.

        Args:
            columns: how many tokens `generate` counts. If more than run, it passed only what follows the cached text.

        Raises:
            KvdslError: if the text is already cached, or differs.
        """
        text, cached = embeddings if ids is None else ids, self._sync.length
        if cached and text is not None and columns < cached + text.shape[1]:
            self.check_text(ids, embeddings)
            speculation.refuse_second_run(cached)


def _can_begin_again(layer: SlotLayer) -> bool:
    """Whether the coming forward is the layer's first prompt and takes nothing that it could not take twice."""
    return not (layer.counted or layer.turn_ends or layer.state.spec.supplied) and layer.undo.log is None
