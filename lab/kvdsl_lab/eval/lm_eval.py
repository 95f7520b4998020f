"""The lm-evaluation-harness through any kvdsl cache: its model `kvdsl`.

The harness's own `hf` model scores a continuation by one forward over the whole text, without a cache, in which nothing is evicted.
Here the context is the prompt of a cache, and the continuation is fed to that, so that every token is predicted from what the policy
has kept.

    python -m kvdsl_lab.eval.lm_eval --model kvdsl --model_args pretrained=PATH,policy=h2o,budget=256 --tasks hellaswag
    accelerate launch -m kvdsl_lab.eval.lm_eval --model kvdsl ...          a process for every GPU, each with its share of the requests

is the harness's own command with this model in it; `import kvdsl_lab.eval.lm_eval` registers it for programs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.precheck import refuse_required
from kvdsl.runtime.hf.versions import with_cache

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as missing:
    raise ImportError(f"this needs {missing.name}, which is not installed: pip install 'kvdsl-lab[lm-eval]'") from missing

Request = tuple[Any, list[int], list[int]]
"""What the harness asks: the texts (None in a rolling window), the context's tokens and the continuation's."""
Answer = tuple[float, bool]
"""The continuation's log-probability, and whether it is the greedy one."""
Group = tuple[tuple[int, ...], list[tuple[int, list[int]]]]
"""A context, and its continuations with the numbers of their requests."""

PIECE = 256
"""Tokens of continuations fed at a time: their logits are held together."""


@register_model("kvdsl")
class KvdslLM(HFLM):
    """A causal model of transformers whose every forward goes through a kvdsl cache.

    Args:
        pretrained: a folder, a hub id or a model; None for the model that ships with kvdsl-lab.
        policy: a shipped policy, or a .kv file.
        kv_backend: what runs it, `auto` or one of `kvdsl.runtime.backends.NAMES`.
        tail: so many tokens at the end of a context, for example its question, are read after the prompt before them was evicted
            from. With 0, a continuation of one token is predicted by the prompt's own forward, which sees all of it.
        given: the policy's params by name (`budget=256`); the rest is for the harness's `HFLM`.

    Raises:
        DiagnosticError: if there is no such policy.
        KvdslError: if the model cannot be served, or an option of `HFLM` has no meaning here.
    """

    def __init__(
        self, pretrained: Any = None, *, policy: str = "roco", kv_backend: str = "auto", tail: int = 0, **given: Any
    ) -> None:  # fmt: skip
        self.policy, self.kv_backend, self.tail = policy, kv_backend, tail
        self.cache_class: Any = load(policy)
        refuse_required(self.cache_class.spec.name, self.cache_class.spec.supplied, "the harness")
        self.params = {name: given.pop(name) for name in self.cache_class.spec.params if name in given}
        if not isinstance(tail, int) or tail < 0:
            raise KvdslError(f"`tail` is a number of tokens, and `{tail}` is none")
        if str(given.get("batch_size", 1)).startswith("auto"):
            raise KvdslError("the harness finds batch sizes by forwards without a cache; give `batch_size` as a number")
        if given.get("mixed_precision_dtype"):
            raise KvdslError("kvdsl caches hold the model's own dtype; give `dtype` instead of `mixed_precision_dtype`")
        if pretrained is None:
            from kvdsl_lab.assets import reference_model_path

            pretrained = str(reference_model_path())
        strange = [name for name in given if name not in inspect.signature(HFLM.__init__).parameters]
        if strange and not isinstance(pretrained, str):
            raise self._unknown(strange[0])
        try:
            super().__init__(pretrained, **given)
        except TypeError as error:  # transformers, to which the harness gives what it does not know
            raise next((self._unknown(name) for name in strange if f"'{name}'" in str(error)), error) from error
        if self.backend != "causal":
            raise KvdslError(f"kvdsl serves causal language models, and this is {self.backend}")
        self.make_cache()  # a model that cannot be served is refused before anything is run

    def _unknown(self, name: str) -> KvdslError:
        """What to say of an option that nobody knows."""
        params = [*self.cache_class.spec.params]
        help = did_you_mean(name, params) or (f"its params are {listed(params, 'and')}" if params else "it has none")
        return KvdslError(f"`{name}` is no param of {self.policy}, and no option of the harness or the model; {help}")

    def make_cache(self) -> Any:
        """An empty cache."""
        return self.cache_class(self.model, backend=self.kv_backend, **self.params)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; where a tokenizer has none, the one that begins it, after which no text goes on either."""
        own = self.tokenizer.eos_token_id
        return int(self.tokenizer.bos_token_id if own is None else own)

    def get_model_info(self) -> dict[str, Any]:
        return {**super().get_model_info(), "kvdsl_policy": self.policy, "kvdsl_params": self.params}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation: Any) -> Tensor:
        if self.tail:
            raise KvdslError(
                "`tail` is for log-likelihoods: a text that is generated follows the whole context; leave it out here"
            )
        return super()._model_generate(context, max_length, stop, **with_cache(self.make_cache()), **generation)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:  # fmt: skip
        answers: dict[int, Answer] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood through kvdsl")
        with bar, torch.inference_mode():
            for batch in batches(by_context(requests, self.max_length), int(self.batch_size), self.tail):
                found = self._scores(batch)
                for number, answer in found.items():
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                answers.update(found)
                bar.update(len(found))
        return [answers[number] for number in range(len(requests))]

    def _scores(self, batch: Sequence[Group]) -> dict[int, Answer]:
        """The contexts are prompts, each fed once; from there on every continuation has a row for itself."""
        cache = self.make_cache()
        with cache.one_by_one():
            return self._scores_through(cache, batch)

    def _scores_through(self, cache: Any, batch: Sequence[Group]) -> dict[int, Answer]:
        ids, mask = left_padded([context for context, _ in batch], self.device)
        if ids.shape[1] == 1:  # there is no prompt that a rate could be of: it is of the whole text, as in `kvdsl eval ppl`
            cache.expect_prompt(1 + _longest(batch[0]))
        for start, stop in steps(ids.shape[1], ids.shape[1] - tail_of(batch[0], self.tail)):
            logits = self._forward(ids[:, start:stop], mask[:, :stop], cache, logits_to_keep=1)
        asked = [(row, number, wanted) for row, (_, those) in enumerate(batch) for number, wanted in those]
        rows = torch.tensor([row for row, _, _ in asked], device=self.device)
        wanted = right_padded([wanted for _, _, wanted in asked], self.device)
        judged = [self._judge(logits[rows], wanted[:, :1])]
        if wanted.shape[1] > 1:
            cache.batch_select_indices(rows)
            mask = mask[rows]
            for start, stop in steps(wanted.shape[1] - 1):
                part = wanted[:, start:stop]
                mask = torch.cat([mask, torch.ones_like(part)], dim=1)
                judged.append(self._judge(self._forward(part, mask, cache), wanted[:, start + 1 : stop + 1]))
        each, greedy = (torch.cat(found, dim=1).cpu() for found in zip(*judged, strict=True))
        return {
            number: (float(each[row, : len(wanted)].sum()), bool(greedy[row, : len(wanted)].all()))
            for row, (_, number, wanted) in enumerate(asked)
        }

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any, **how: Any) -> Tensor:
        """Logits [rows, tokens, vocabulary] of the newest tokens; `mask` [rows, length] is 0 at padding, of all that was fed."""
        place = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found = self.model(
            input_ids=ids, attention_mask=mask, position_ids=place, **with_cache(cache), use_cache=True, **how
        )  # fmt: skip
        return found.logits

    def _judge(self, logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of tokens, and whether they are the likeliest, [rows, tokens] each."""
        logs = torch.nn.functional.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return logs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), logs.argmax(-1) == wanted


# -- requests ----------------------------------------------------------------------------------------------------------


def by_context(requests: Sequence[Request], max_length: int) -> list[Group]:
    """Continuations of the same context together, the longest texts first; behind a single token, of which nothing can be shared, alone.

    As the harness has it, what is too long for the model loses its beginning; the last token of a continuation is never fed.
    """
    groups: dict[tuple[tuple[int, ...], int | None], list[tuple[int, list[int]]]] = {}
    for number, (_, context, wanted) in enumerate(requests):
        if not 0 < len(wanted) <= max_length:
            raise KvdslError(f"a continuation of {len(wanted)} tokens does not fit into the model's {max_length}")
        kept = (context + wanted)[-(max_length + 1) : -len(wanted)]
        groups.setdefault((tuple(kept), number if len(kept) == 1 else None), []).append((number, wanted))
    found = [(context, those) for (context, _), those in groups.items()]
    return sorted(found, key=lambda group: -len(group[0]) - _longest(group))


def tail_of(group: Group, tail: int) -> int:
    """How many tokens of a context are read after its prompt, which has one at least."""
    return min(tail, len(group[0]) - 1)


def _kind(group: Group, tail: int) -> tuple[int, int]:
    """What contexts of a batch have in common: how long their tails are and, of single tokens, how long the whole text becomes."""
    return tail_of(group, tail), _longest(group) if len(group[0]) == 1 else 0


def _longest(group: Group) -> int:
    """Tokens of the longest continuation."""
    return max(len(wanted) for _, wanted in group[1])


def batches(groups: Sequence[Group], size: int, tail: int = 0) -> Iterator[list[Group]]:
    """Contexts with `size` continuations together, or a single one that has more; their tails are of one length."""
    batch: list[Group] = []
    rows = 0
    for group in groups:
        if batch and (rows + len(group[1]) > size or _kind(group, tail) != _kind(batch[0], tail)):
            yield batch
            batch, rows = [], 0
        batch.append(group)
        rows += len(group[1])
    if batch:
        yield batch


def steps(length: int, prompt: int = 0) -> Iterator[tuple[int, int]]:
    """From where to where `length` tokens are fed at a time, the first `prompt` together."""
    ends = [*([prompt] if prompt else []), *range(prompt + PIECE, length, PIECE), length]
    start = 0
    for end in ends:
        if start < end <= length:
            yield start, end
            start = end


def left_padded(rows: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """Tokens [rows, longest] that end together, and a mask that is 0 before them."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def right_padded(rows: Sequence[Sequence[int]], device: Any) -> Tensor:
    """Tokens [rows, longest] that begin together; what stands after a row's end comes after all that counts."""
    longest = max(map(len, rows))
    return torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows], device=device)


def main() -> None:
    """The harness's own command, with the model `kvdsl` in it."""
    from lm_eval.__main__ import cli_evaluate

    from kvdsl.cli.common import guarded
    from kvdsl.diagnostics import DiagnosticError

    try:
        cli_evaluate()
    except (KvdslError, DiagnosticError) as failure:
        told = failure

        def tell() -> None:
            raise told

        sys.exit(guarded(tell))


if __name__ == "__main__":
    main()
