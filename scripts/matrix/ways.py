"""The ways in which a model is called with a cache. Each is one function, which returns if all was right and raises otherwise.

What it raises is the outcome: `Wrong`, `NotTried`, a `KvdslError` (refused), or any other exception (failed). Where a part of a way
is there to be refused (a mask that hides what is cached, an unrelated text), a refusal is right.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import cache_of, with_cache
from scripts.matrix import subject
from scripts.matrix.subject import NotTried, Subject, Wrong, native, same, theirs

LENGTH = 28
"""Of most prompts: with `NEW` tokens, a text passes windows of 8 and, in Phi-3's extra row, 32 tokens."""

NEW = 10
ROUNDS = 2
"""Of models that two threads begin with."""

_PATIENCE = 60
"""Seconds that threads may take."""

Way = Callable[[Subject], None]
WAYS: dict[str, Way] = {}

_Call = Callable[[Any, Any, dict[str, Any]], Tensor]


def way(function: Way) -> Way:
    """Register a way by its function's name."""
    WAYS[function.__name__.replace("_", " ")] = function
    return function


# -- generate ----------------------------------------------------------------------------------------------------------


@way
def generate(case: Subject) -> None:
    """`generate` with left padding: the same tokens; the cache that was given comes back, and has counted. The usual backend serves."""
    ids, mask = subject.padded(LENGTH, range(6))
    expected = theirs(lambda: _generated(case.other, native(case.other), ids, mask))
    cache = case.cache(backend="auto")
    out = _generated(case.model, cache, ids, mask)
    _same_text(out, expected)
    _is_the_cache(out, cache, LENGTH + NEW - 1)


@way
def generate_within_a_budget(case: Subject) -> None:
    """`generate` behind a prompt of 60 tokens: a budget of 16 is what every KV head holds."""
    ids, new = subject.text(1, 60), 4
    theirs(lambda: _generated(case.other, native(case.other), ids, torch.ones_like(ids), new=new))
    cache = case.cache(budget=16, backend="auto")
    out = _generated(case.model, cache, ids, torch.ones_like(ids), new=new)
    _is_the_cache(out, cache, 60 + new - 1)
    for layer in cache.managed:
        held = (cache.positions(layer) >= 0).sum(-1)
        if not bool((held == 16).all()):
            raise Wrong(f"layer {layer} holds {held.flatten().tolist()} tokens under a budget of 16")


def _generated(model: Any, cache: Any, ids: Tensor, mask: Tensor, *, new: int = NEW) -> Any:
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(
        input_ids=ids, attention_mask=mask, **with_cache(cache), max_new_tokens=new, min_new_tokens=new, **options
    )


def _same_text(out: Any, expected: Any) -> None:
    """Raise Wrong if greedy tokens differ, or logits before."""
    for step, (logits, wanted) in enumerate(zip(out.logits, expected.logits, strict=True)):
        same(logits, wanted, f"logits of generated token {step}")
    if not torch.equal(out.sequences, expected.sequences):
        raise Wrong("other greedy tokens, behind the same logits")


def _is_the_cache(out: Any, cache: Any, seen: int) -> None:
    """Raise Wrong unless generation returned this cache, which has seen so many tokens."""
    returned = cache_of(vars(out))
    if returned is not cache:
        raise Wrong(f"generate drops the cache: it returns a {type(returned).__name__} of its own")
    if cache.get_seq_length() != seen:
        raise Wrong(f"the cache has seen {cache.get_seq_length()} of {seen} tokens")


# -- forwards ----------------------------------------------------------------------------------------------------------


@way
def by_name(case: Subject) -> None:
    """Forwards of the model: a left-padded prompt and two tokens."""
    _in_steps(case, case.model, case.other, subject.by_name)


@way
def by_position(case: Subject) -> None:
    """The same; the cache and all before it are given by position."""
    _in_steps(case, case.model, case.other, subject.by_position)


@way
def inner_model(case: Subject) -> None:
    """The same with the model inside of the language model."""
    _in_steps(case, _inner(case.model), _inner(case.other), subject.by_name)


@way
def hiding_mask(case: Subject) -> None:
    """A 2-D mask of the text that hides cached tokens: followed or refused."""
    _in_steps(case, case.model, case.other, subject.by_name, hides=True)


@way
def hiding_mask_by_position(case: Subject) -> None:
    """The same, all arguments by position."""
    _in_steps(case, case.model, case.other, subject.by_position, hides=True)


@way
def hiding_mask_in_the_inner_model(case: Subject) -> None:
    """The same with the model inside of the language model."""
    _in_steps(case, _inner(case.model), _inner(case.other), subject.by_name, hides=True)


@way
def generate_behind_the_inner_model(case: Subject) -> None:
    """`generate` with another text than the inner model has run: refused."""
    ids, mask = subject.padded(20)
    another, whole = subject.text(2, 30, seed=2), torch.ones(2, 30, dtype=torch.long)
    inner, cache = _inner(case.model), case.cache()
    given = subject.arguments(inner, ids, mask, 0, 20)
    theirs(lambda: subject.by_name(_inner(case.other), native(case.other), given))
    theirs(lambda: _generated(case.other, native(case.other), another, whole, new=2))
    subject.by_name(inner, cache, given)
    try:
        _generated(case.model, cache, another, whole, new=2)
    except KvdslError:
        return
    raise Wrong("generate goes on with an unrelated text, behind a prompt that the inner model ran")


def _inner(model: Any) -> Any:
    """The model inside of a language model.

    Raises:
        NotTried: if there is none.
    """
    inside = [model.base_model, *(part for part in model.children() if isinstance(part, PreTrainedModel))]
    for found in inside:
        if found is not model and found is not None:
            return found
    raise NotTried("there is no model inside")


def _in_steps(case: Subject, module: Any, other: Any, call: _Call, *, hides: bool = False) -> None:
    """Prompt, token, token; and, if asked, one that is not to see some of what is cached."""
    ids, mask = subject.padded(LENGTH + 3, range(6))
    kept, cache = theirs(lambda: native(case.other)), case.cache()
    for begin, end in ((0, LENGTH), (LENGTH, LENGTH + 1), (LENGTH + 1, LENGTH + 2)):
        _same_forward(module, other, cache, kept, call, ids, mask, begin, end)
    if hides:
        hiding = mask.clone()
        hiding[:, LENGTH - 6 : LENGTH - 1] = 0
        given = subject.arguments(module, ids, mask, LENGTH + 2, LENGTH + 3) | {"attention_mask": hiding}
        _honoured_or_refused(lambda: call(module, cache, given), lambda: call(other, kept, given))


def _same_forward(
    module: Any, other: Any, cache: Any, kept: Any, call: _Call, ids: Tensor, mask: Tensor, begin: int, end: int
) -> None:
    """Raise Wrong if these tokens of a text give something else with our cache than with transformers' own."""
    given = subject.arguments(module, ids, mask, begin, end)
    with torch.no_grad():
        expected = theirs(lambda: call(other, kept, given))
        found = call(module, cache, given)
    same(found, expected, f"tokens {begin} to {end - 1}", mask[:, begin:end])


def _honoured_or_refused(ours: Callable[[], Tensor], expected: Callable[[], Tensor]) -> None:
    """Raise Wrong if a mask that hides cached tokens is neither followed nor refused."""
    with torch.no_grad():
        wanted = theirs(expected)
        try:
            found = ours()
        except KvdslError:
            return
    same(found, wanted, "the mask hides cached tokens, which are seen all the same")


@way
def chunks(case: Subject) -> None:
    """A prompt in three forwards, and a token."""
    _in_chunks(case, *subject.padded(25))


@way
def chunks_with_a_gap(case: Subject) -> None:
    """The same in a batch with padding on the left and in the middle."""
    _in_chunks(case, *subject.padded(25, range(5), range(10, 14)))


def _in_chunks(case: Subject, ids: Tensor, mask: Tensor) -> None:
    kept, cache = theirs(lambda: native(case.other)), case.cache()
    for begin, end in ((0, 8), (8, 16), (16, 24), (24, 25)):
        _same_forward(case.model, case.other, cache, kept, subject.by_name, ids, mask, begin, end)


@way
def mask_of_ones(case: Subject) -> None:
    """A bool mask [rows, 1, 1, 1] of ones at a step of one token."""
    expected = _understood_ones(case)
    same(_step_with_mask(case.model, case.cache(), _ONES), expected, "a mask of ones")


@way
def ready_made_hiding_mask(case: Subject) -> None:
    """A bool mask [rows, 1, 1, columns] at a step of one token, which hides cached tokens: followed or refused."""
    _understood_ones(case)
    cache = case.cache()
    _honoured_or_refused(
        lambda: _step_with_mask(case.model, cache, _HIDING),
        lambda: _step_with_mask(case.other, native(case.other), _HIDING),
    )


_ONES = torch.ones(2, 1, 1, 1, dtype=torch.bool)
_HIDING = torch.ones(
    2, 1, 1, 7, dtype=torch.bool
)  # no more than windows hold: behind them columns are not those of the text
_HIDING[..., 2:5] = False


def _understood_ones(case: Subject) -> Tensor:
    """What transformers' own cache gives with a mask of ones.

    Raises:
        NotTried: if that is something else than without a mask: the model's own attention takes bools for numbers.
    """
    with_ones, without = (
        theirs(partial(_step_with_mask, case.other, theirs(lambda: native(case.other)), mask)) for mask in (_ONES, None)
    )
    if subject.deviation(with_ones, without) > subject.TOLERANCE:
        raise NotTried("its own attention takes bool masks for numbers")
    return with_ones


def _step_with_mask(model: Any, cache: Any, mask: Tensor | None) -> Tensor:
    """A prompt of six tokens, and what one more with this mask gives."""
    ids, whole = subject.padded(7)
    step = subject.arguments(model, ids, whole, 6, 7)
    with torch.no_grad():
        subject.by_name(model, cache, subject.arguments(model, ids, whole, 0, 6))
        return subject.by_name(model, cache, step if mask is None else step | {"attention_mask": mask})


# -- training ----------------------------------------------------------------------------------------------------------


@way
def training(case: Subject) -> None:
    """A step of training with gradient checkpointing (where there is that), padding and labels: the same loss and gradients."""
    ids, mask = subject.padded(LENGTH, range(6))
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    other = case.fresh()
    expected = theirs(lambda: _trained(other, native(other), given))
    model = case.fresh()
    found = _trained(model, case.cache(model), given)
    same(found[0], expected[0], "the loss")
    same(found[1], expected[1], "the gradients")


def _trained(model: Any, cache: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss [1] and the gradients [parameters] of one step."""
    model.train()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    loss = model(**given, **{subject.cache_name(model): cache}, use_cache=True).loss
    loss.backward()
    gradients = [torch.zeros(1) if p.grad is None else p.grad.flatten().float() for p in model.parameters()]
    return loss.detach().float().reshape(1), torch.cat(gradients)


# -- threads -----------------------------------------------------------------------------------------------------------


@way
def threads(case: Subject) -> None:
    """Two threads make a model's first caches and generate, while a third runs it without kvdsl."""
    texts = [subject.text(1, LENGTH, seed) for seed in (1, 2)]
    ids, mask = subject.padded(LENGTH, range(6))
    plain = subject.arguments(case.other, ids, mask, 0, LENGTH) | {"use_cache": False}

    def plainly(model: Any, make: Callable[[Any], Any], one: Tensor) -> Any:
        return _generated(model, make(model), one, torch.ones_like(one))

    with torch.no_grad():
        alone = theirs(lambda: subject.first(case.other(**plain)))
        generated = [theirs(partial(plainly, case.other, native, one)) for one in texts]

    def at_once(model: Any, make: Callable[[Any], Any]) -> None:
        def generates(index: int) -> None:
            _same_text(plainly(model, make, texts[index]), generated[index])

        def runs() -> None:
            try:
                with torch.no_grad():
                    found = subject.first(model(**plain))
            except Exception as error:
                raise Wrong(f"a forward without kvdsl raises {subject.described(error)}") from error
            same(found, alone, "a forward without kvdsl", mask)

        _together([partial(generates, 0), partial(generates, 1)], meanwhile=runs)

    try:
        theirs(lambda: at_once(case.fresh(), native))
    except NotTried as reason:
        raise NotTried(f"in threads, {reason}") from None
    for _ in range(ROUNDS):
        at_once(case.fresh(), case.cache)


def _together(parts: list[Callable[[], None]], *, meanwhile: Callable[[], None]) -> None:
    """Run these at the same time, and one thing again and again until they are done; raise the worst of their errors."""
    errors: list[Exception] = []
    begin, done = threading.Barrier(len(parts) + 1), threading.Event()

    def guarded(part: Callable[[], None]) -> None:
        try:
            begin.wait()
            part()
        except Exception as error:
            errors.append(error)

    def repeated() -> None:
        while not done.is_set():
            meanwhile()

    started = [threading.Thread(target=guarded, args=(part,), daemon=True) for part in parts]
    third = threading.Thread(target=guarded, args=(repeated,), daemon=True)
    with _switching_often():
        for thread in (*started, third):
            thread.start()
        for thread in started:
            thread.join(_PATIENCE)
        done.set()
        third.join(_PATIENCE)
    if any(thread.is_alive() for thread in (*started, third)):
        raise TimeoutError(f"threads are not done after {_PATIENCE} s")
    if errors:
        raise min(errors, key=lambda error: 2 * isinstance(error, KvdslError) + isinstance(error, Wrong))


@contextmanager
def _switching_often() -> Iterator[None]:
    """Have Python change between threads often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
