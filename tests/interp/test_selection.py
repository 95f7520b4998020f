"""What a decode query attends to: pages, sketches and the selected slots, by brute force and in every corner."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdsl.interp import Call, Head, Interpreter, resolve
from kvdsl.interp.attention import selected, sketch_dims
from kvdsl.ir.nodes import Expr, Policy
from kvdsl.ir.visitors import with_policy
from kvdsl.passes.columns import add_columns

from .policies import (
    ATTN,
    POSITION,
    K,
    Q,
    binary,
    bounded,
    call,
    first,
    last,
    num,
    over,
    over_page,
    over_sketch,
    queries,
    read,
    select,
    sketch,
    top,
    where,
)

DIM, GROUP = 6, 2
NAN = math.nan
DOT = over("sum", "dim", binary(Q, "*", K))
QUEST = over("sum", "dim", call("max", binary(Q, "*", over_page("min", K)), binary(Q, "*", over_page("max", K))))


def trace(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(tokens, GROUP, DIM)), *random.normal(size=(2, tokens, DIM))


def start(policy: Policy, prompt: int = 0, setting: Call | None = None, **more: float) -> tuple[Interpreter, Head]:
    interpreter = Interpreter(policy, resolve(policy, prompt=prompt, **more), setting or Call())
    return interpreter, interpreter.empty(DIM, DIM)


def keeping(*keeps: object, **more: object) -> Policy:
    """A policy that keeps everything."""
    return Policy(name="Example", stem="example", keeps=keeps, **more)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(axis=-1, keepdims=True)


# -- the pure functions ----------------------------------------------------------------------------------------------


def chosen(by: list[float], count: float, protected: tuple[int, ...] = (), page: float = 1, place: list[int] | None = None):
    position = np.arange(len(by)) if place is None else np.array(place)
    mask = np.isin(np.arange(len(by)), protected)
    return np.flatnonzero(selected(np.array(by, dtype=float), position, mask, count, page)).tolist()


@pytest.mark.parametrize(
    ("by", "count", "protected", "expected"),
    [
        ([3, 1, 2], 2, (), [0, 2]),
        ([3, 1, 2], 1, (), [0]),
        ([3, 1, 2], 0, (), [0]),  # one at least
        ([3, 1, 2], 1.9, (), [0]),
        ([3, 1, 2], 3, (), [0, 1, 2]),
        ([3, 1, 2], math.inf, (), [0, 1, 2]),
        ([1, 1, 1], 2, (), [1, 2]),  # ties: the newer
        ([0.0, -0.0], 1, (), [1]),
        ([-0.0, 0.0], 1, (), [1]),
        ([NAN, -math.inf, NAN], 1, (), [1]),  # NaN is lowest
        ([NAN, -math.inf, NAN], 2, (), [1, 2]),
        ([3, 1, 2], 2, (1,), [0, 1]),  # the protected count
        ([3, 1, 2], 1, (1,), [1]),
        ([3, 1, 2], 1, (1, 2), [1, 2]),  # and are selected in any case
        ([NAN, 1, 2], 2, (0,), [0, 2]),
    ],
)
def test_who_is_selected(by: list[float], count: float, protected: tuple[int, ...], expected: list[int]) -> None:
    assert chosen(by, count, protected) == expected


def test_the_newer_is_the_later_in_the_text() -> None:
    assert chosen([1, 1, 1], 2, place=[7, 1, 3]) == [0, 2]


@pytest.mark.parametrize(
    ("by", "count", "protected", "expected"),
    [
        ([1, 2, 3, 4, 5, 6], 3, (), [4, 5]),  # pages of two; three tokens are one page
        ([1, 2, 3, 4, 5, 6], 4, (), [2, 3, 4, 5]),
        ([9, 2, 3, 4, 5, 6], 2, (), [0, 1]),  # a page ranks by its best
        ([9, 2, 3, 4, 5, 6], 1, (), [0, 1]),
        ([9, NAN, 3, 4, 5, 6], 2, (), [0, 1]),  # a NaN does not spoil its page
        ([NAN, NAN, 3, -9, NAN, NAN], 4, (), [2, 3, 4, 5]),
        ([7, 7, 7, 7, 7, 7], 2, (), [4, 5]),  # of equals the higher page
        ([9, 2, 3, 4, 5, 6], 2, (3,), [2, 3]),
        ([9, 2, 3, 4, 5, 6], 4, (3,), [0, 1, 2, 3]),
        ([9, 2, 3, 4, 5, 6], 2, (1, 4), [0, 1, 4, 5]),
        ([9, 2, 3, 4, 5, 6], 99, (), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_pages_are_selected_whole(by: list[float], count: float, protected: tuple[int, ...], expected: list[int]) -> None:
    assert chosen(by, count, protected, page=2) == expected


def test_pages_with_holes() -> None:
    """Pages of 4 go by the text's positions: slots at 0, 3 | 4 | 11 | 13, 14; the last page is not full."""
    place = [13, 0, 3, 4, 11, 14]
    assert chosen([1, 2, 3, 4, 5, 0], 4, page=4, place=place) == [4]
    assert chosen([1, 2, 3, 4, 5, 0], 8, page=4, place=place) == [3, 4]
    assert chosen([6, 2, 3, 4, 5, 0], 8, page=4, place=place) == [0, 4, 5]
    assert chosen([1, 2, 3, 4, 5, 0], 4, (5,), page=4, place=place) == [0, 5]


def test_the_dims_of_a_sketch() -> None:
    assert sketch_dims(np.array([1.0, 5, 3, 5]), 2).tolist() == [1, 3]
    assert sketch_dims(np.array([5.0, 5, 5, 5]), 2).tolist() == [0, 1]  # of equals the lower
    assert sketch_dims(np.array([0.0, -0.0]), 1).tolist() == [0]
    assert sketch_dims(np.array([NAN, -math.inf, NAN]), 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match="a sketch of 5 dims of keys that have 4"):
        sketch_dims(np.zeros(4), 5)


# -- selecting tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_top_tokens_by_brute_force(group: str) -> None:
    """A prompt is dense; a decode query attends to the newest token and the best 4 others, per KV head."""
    policy = keeping(last(1), select=select(5, DOT), group=group)
    interpreter, head = start(policy, prompt=8)
    q, k, v = trace(20)
    step = interpreter.prefill(head, q[:8], k[:8], v[:8])
    np.testing.assert_allclose(step.out[7], softmax(q[7] @ k[:8].T) @ v[:8])
    assert step.selected is None
    for token in range(8, 20):
        step = interpreter.decode(head, q[token], k[token], v[token])
        match = getattr(q[token] @ k[: token + 1].T, group)(axis=0)
        best = sorted(range(token), key=lambda slot: match[slot])[-4:]
        expected = sorted([*best, token])
        assert np.flatnonzero(step.selected).tolist() == expected
        probs = softmax(q[token] @ k[expected].T)
        np.testing.assert_allclose(step.out, probs @ v[expected])
        np.testing.assert_allclose(step.attn[expected], getattr(probs, group)(axis=0))
        assert np.flatnonzero(step.attn).tolist() == np.flatnonzero(step.logit > -np.inf).tolist() == expected
    assert head.live == 20


@pytest.mark.parametrize("page", [1, 3])
def test_each_query_head_selects_for_itself(page: int) -> None:
    """By brute force: of pages that of the newest token, and those whose best token is among the best."""
    pages = {} if page == 1 else {"pages": num(page)}
    policy = keeping(last(1), select=select(4 * page, DOT), group="each", **pages)
    interpreter, head = start(policy, prompt=8)
    q, k, v = trace(25)
    interpreter.prefill(head, q[:8], k[:8], v[:8])
    apart = 0
    for token in range(8, 25):
        step = interpreter.decode(head, q[token], k[token], v[token])
        for index in range(GROUP):
            match = k[: token + 1] @ q[token, index]
            best = {slot // page: max(match[slot // page * page :][:page]) for slot in range(token + 1)}
            others = sorted((one for one in best if one != token // page), key=lambda one: best[one])[-3:]
            expected = [slot for slot in range(token + 1) if slot // page in (*others, token // page)]
            assert step.reads[index].tolist() == expected
            np.testing.assert_allclose(step.out[index], softmax(match[expected]) @ v[expected])
        apart += step.reads[0].tolist() != step.reads[1].tolist()
        assert step.picked.tolist() == sorted({*step.reads[0].tolist(), *step.reads[1].tolist()})
    assert apart > 5, "the query heads choose the same"


@pytest.mark.parametrize(("tokens", "page"), [(12, 1), (99, 1), (math.inf, 1), (16, 4), (64, 7)])
def test_selecting_everything_is_dense_exactly(tokens: float, page: int) -> None:
    q, k, v = trace(12)
    dense, full = start(keeping())
    sparse, head = start(keeping(last(1), select=select(tokens, DOT), pages=num(page)))
    for token in range(12):
        one, other = dense.decode(full, q[token], k[token], v[token]), sparse.decode(head, q[token], k[token], v[token])
        assert (one.out == other.out).all()
        assert (one.attn == other.attn).all()
        assert other.selected.all()


def test_layers_outside_attend_to_everything() -> None:
    policy = keeping(last(1), select=select(3, DOT, low=2, high=4))
    q, k, v = trace(9)
    for layer in range(6):
        interpreter, head = start(policy, layer=layer, layers=6)
        for token in range(9):
            step = interpreter.decode(head, q[token], k[token], v[token])
        assert step.selected.sum() == (3 if 2 <= layer <= 4 else 9)


def test_sinks_join_the_denominator() -> None:
    sinks = np.array([0.5, -1.0])
    interpreter, head = start(keeping(last(1), select=select(3, DOT)), setting=Call(sinks=sinks))
    q, k, v = trace(9)
    for token in range(9):
        step = interpreter.decode(head, q[token], k[token], v[token])
    slots = np.flatnonzero(step.selected)
    weights = np.exp(q[8] @ k[slots].T)
    np.testing.assert_allclose(step.out, weights @ v[slots] / (weights.sum(axis=1) + np.exp(sinks))[:, None])


def test_only_what_the_query_sees_is_selected() -> None:
    """A model's window of 5: the first token is protected but out of sight, and takes no place."""
    interpreter, head = start(keeping(first(1), last(1), select=select(3, POSITION)), setting=Call(window=5))
    q, k, v = trace(9)
    for token in range(9):
        step = interpreter.decode(head, q[token], k[token], v[token])
        expected = [*range(token + 1)][-3:] if token > 4 else sorted({0, token, max(token - 1, 0)})
        assert np.flatnonzero(step.selected).tolist() == expected
    np.testing.assert_allclose(step.out, softmax(q[8] @ k[6:].T) @ v[6:])


def test_reductions_over_slots_are_over_what_the_query_sees() -> None:
    """Those nearest to the mean of the positions in sight."""
    from_mean = call("abs", binary(POSITION, "-", over("mean", "slot", POSITION)))
    interpreter, head = start(keeping(select=select(3, call("neg", from_mean))), setting=Call(window=5))
    q, k, v = trace(9)
    for token in range(9):
        step = interpreter.decode(head, q[token], k[token], v[token])
    assert np.flatnonzero(step.selected).tolist() == [5, 6, 7]


def test_what_is_skipped_is_observed_as_nothing() -> None:
    """Each query's mean over the slots counts the skipped ones, and their sums do not grow."""
    above = queries("sum", binary(ATTN, ">", over("mean", "slot", ATTN)))
    policy = bounded(binary(queries("sum", ATTN), "+", above), last(1), budget=99, select=select(3, POSITION))
    for form in (policy, add_columns(policy)):
        interpreter, head = start(form)
        q, k, v = trace(7)
        total = np.zeros(7)
        for token in range(7):
            step = interpreter.decode(head, q[token], k[token], v[token])
            slots = list(range(token + 1))[-3:]
            probs = np.zeros(token + 1)
            probs[slots] = softmax(q[token] @ k[slots].T).mean(axis=0)
            total[: token + 1] += probs + (probs > probs.mean())
            np.testing.assert_allclose(step.score, total[: token + 1])


def test_nothing_protects_the_newest_but_a_keep() -> None:
    oldest_first = binary(num(0), "-", POSITION)
    interpreter, head = start(keeping(select=select(2, oldest_first)))
    q, k, v = trace(5)
    for token in range(5):
        step = interpreter.decode(head, q[token], k[token], v[token])
    assert np.flatnonzero(step.selected).tolist() == [0, 1]
    np.testing.assert_allclose(step.out, softmax(q[4] @ k[:2].T) @ v[:2])


def test_scopes_and_conditions_do_not_select() -> None:
    """`keep top` and `keep where` protect from eviction only; `keep first` and `keep last` are selected whatever they rank."""
    scopes = (top(2, queries("mean", ATTN)), where(binary(read("observed"), "==", num(3))))
    latest = keeping(*scopes, select=select(3, POSITION))
    ends = keeping(
        *scopes, first(1), last(1), select=select(3, binary(num(0), "-", call("abs", binary(POSITION, "-", num(5)))))
    )
    for policy in (latest, ends, add_columns(latest), add_columns(ends)):
        interpreter, head = start(policy)
        q, k, v = trace(14)
        for token in range(14):
            step = interpreter.decode(head, q[token], k[token], v[token])
        assert np.flatnonzero(step.selected).tolist() == ([0, 5, 13] if first(1) in policy.keeps else [11, 12, 13])


def test_selecting_from_what_eviction_left() -> None:
    policy = bounded(queries("sum", ATTN), last(2), budget=6, select=select(4, DOT))
    q, k, v = trace(24)
    for form in (policy, add_columns(policy)):
        interpreter, head = start(form, prompt=10)
        interpreter.prefill(head, q[:10], k[:10], v[:10])
        kept, total = list(range(10)), softmax(np.where(np.tri(10), np.einsum("lgd,sd->gls", q[:10], k[:10]), -np.inf))
        total = dict(enumerate(total.mean(axis=0).sum(axis=0)))
        for token in range(9, 24):
            if token > 9:
                kept.append(token)
                total[token] = 0.0
                match = dict(zip(kept, (q[token] @ k[kept].T).mean(axis=0), strict=True))
                best = sorted(kept[:-2], key=match.__getitem__)[-2:]
                slots = sorted([*best, *kept[-2:]])
                probs = softmax(q[token] @ k[slots].T)
                step = interpreter.decode(head, q[token], k[token], v[token])
                assert step.position[step.selected].tolist() == slots
                np.testing.assert_allclose(step.out, probs @ v[slots])
                for slot, x in zip(slots, probs.mean(axis=0), strict=True):
                    total[slot] += x
            kept = sorted(sorted(kept[:-2], key=total.__getitem__)[len(kept) - 6 :] + kept[-2:])
            assert sorted(head.position.tolist()) == kept


# -- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 3, 4.7])
def test_bounds_of_pages_by_brute_force(page: float) -> None:
    """Quest's upper bound on pages with holes and a partial one, after an eviction of every fifth token."""
    policy = keeping(last(2), select=select(8, QUEST), pages=num(page))
    interpreter, head = start(policy)
    q, k, v = trace(24)
    place = np.array([p for p in np.random.default_rng(1).permutation(20) if p % 5])
    head = interpreter.resume(k[place], v[place], place, {}, 20)
    size = max(1, math.floor(page))
    kept = sorted(place.tolist())
    for token in range(20, 24):
        kept.append(token)
        pages: dict[int, list[int]] = {}
        for slot in kept:
            pages.setdefault(slot // size, []).append(slot)

        def bound(slots: list[int], query: np.ndarray) -> float:
            low, high = k[slots].min(axis=0), k[slots].max(axis=0)
            return sum(max(x * a, x * b) for x, a, b in zip(query, low, high, strict=True))

        by = {number: np.mean([bound(slots, query) for query in q[token]]) for number, slots in pages.items()}
        certain = {number for number, slots in pages.items() if {*kept[-2:]} & {*slots}}
        others = sorted(pages.keys() - certain, key=by.__getitem__, reverse=True)
        chosen_pages = [*certain, *others[: max(0, 8 // size - len(certain))]]
        expected = sorted(slot for number in chosen_pages for slot in pages[number])
        step = interpreter.decode(head, q[token], k[token], v[token])
        assert sorted(step.position[step.selected].tolist()) == expected
        np.testing.assert_allclose(step.out, softmax(q[token] @ k[expected].T) @ v[expected])


def test_every_slot_has_its_pages_value() -> None:
    """In a score: over the live slots of the page."""
    policy = bounded(over_page("max", over("sum", "dim", K)), budget=5, pages=num(3))
    interpreter, head = start(policy)
    k = np.zeros((8, DIM))
    k[:, 0] = [4, 1, 2, 0, 0, 6, 3, 5]
    step = interpreter.observe_rows(head, np.ones((8, 8)), k, k)
    assert step.score.tolist() == [4, 4, 4, 6, 6, 6, 5, 5]
    assert head.position.tolist() == [3, 4, 5, 6, 7]
    step = interpreter.observe_row(head, np.ones(6), k[0], k[0])
    assert step.score.tolist() == [6, 6, 6, 5, 5, 5]


def test_a_nan_spoils_the_bounds_of_its_page_only() -> None:
    policy = bounded(over_page("min", over("sum", "dim", K)), budget=9, pages=num(2))
    interpreter, head = start(policy)
    k = np.array([[1.0], [NAN], [3], [2]]) * np.eye(1, DIM)
    k[1] = NAN
    assert np.isnan(interpreter.observe_rows(head, np.ones((4, 4)), k, k).score).tolist() == [True, True, False, False]


# -- sketches --------------------------------------------------------------------------------------------------------


def sparse(count: float, dims: float, every: float, by: Expr | None = None) -> Policy:
    dot = over_sketch("sum", binary(Q, "*", K))
    return keeping(last(1), select=select(count, dot), sketch=sketch(dims, by or call("abs", Q), every))


@pytest.mark.parametrize("cuts", [(5,), (2, 3)])
@pytest.mark.parametrize("every", [1, 3, 3.9, 0, 100])
def test_when_a_sketch_is_refreshed(every: float, cuts: tuple[int, ...]) -> None:
    """A prompt of 5: at its last query, and, every 3, at the decode queries 3, 6, ..., before they select."""
    interpreter, head = start(sparse(4, 2, every), prompt=5)
    q, k, v = trace(18)
    at = 0
    for length in cuts:
        interpreter.prefill(head, q[at : at + length], k[at : at + length], v[at : at + length])
        at += length
    newest_sketch = 4
    for token in range(5, 18):
        if (token - 4) % max(1, math.floor(every)) == 0:
            newest_sketch = token
        step = interpreter.decode(head, q[token], k[token], v[token])
        dims = np.sort(np.argsort(-np.abs(q[newest_sketch]).mean(axis=0))[:2])
        assert head.sketch.tolist() == dims.tolist()
        match = (q[token][:, dims] @ k[: token + 1, dims].T).mean(axis=0)
        best = sorted([*sorted(range(token), key=lambda slot: match[slot])[-3:], token])
        assert np.flatnonzero(step.selected).tolist() == best
        np.testing.assert_allclose(step.out, softmax(q[token] @ k[best].T) @ v[best])


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_a_sketch_is_reduced_over_the_group_and_may_read_keys(group: str) -> None:
    by = binary(call("abs", Q), "*", call("abs", over("mean", "slot", K)))
    interpreter, head = start(with_policy(sparse(4, 3, 100, by), group=group), prompt=6, setting=Call(window=4))
    q, k, v = trace(6)
    interpreter.prefill(head, q, k, v)
    expected = getattr(np.abs(q[5]) * np.abs(k[2:].mean(axis=0)), group)(axis=0)  # the query sees four
    assert head.sketch.tolist() == np.sort(np.argsort(-expected)[:3]).tolist()


def test_a_sketch_without_queries() -> None:
    interpreter, head = start(sparse(4, 2, 100, over("max", "slot", K)), prompt=6)
    q, k, v = trace(6)
    interpreter.prefill(head, q, k, v)
    assert head.sketch.tolist() == np.sort(np.argsort(-k.max(axis=0))[:2]).tolist()


def test_a_first_token_without_a_prompt_finds_a_sketch() -> None:
    interpreter, head = start(sparse(4, 2, 100))
    q, k, v = trace(1)
    interpreter.decode(head, q[0], k[0], v[0])
    assert head.sketch.tolist() == np.sort(np.argsort(-np.abs(q[0]).mean(axis=0))[:2]).tolist()


def test_resuming_a_sketch() -> None:
    interpreter, head = start(sparse(4, 2, 100), prompt=5)
    q, k, v = trace(7)
    interpreter.prefill(head, q[:5], k[:5], v[:5])
    resumed = interpreter.resume(head.key, head.value, head.position, {}, head.seen, sketch=head.sketch[::-1])
    clone = head.clone()
    for token in (5, 6):
        steps = [interpreter.decode(state, q[token], k[token], v[token]) for state in (head, resumed, clone)]
        assert all((step.selected == steps[0].selected).all() for step in steps)


def test_more_dims_than_keys_have() -> None:
    interpreter, head = start(sparse(4, DIM + 1, 100), prompt=5)
    q, k, v = trace(5)
    with pytest.raises(ValueError, match="a sketch of 7 dims of keys that have 6"):
        interpreter.prefill(head, q, k, v)


def test_over_the_sketch_counts_its_dims_only() -> None:
    policy = bounded(over_sketch("sum", num(1)), sketch=sketch(4, call("abs", Q), 100))
    interpreter, head = start(policy, prompt=3)
    q, k, v = trace(3)
    assert interpreter.prefill(head, q, k, v).score.tolist() == [4, 4, 4]
    with pytest.raises(LookupError, match="no sketch before"):
        interpreter.observe_row(interpreter.empty(DIM, DIM), [1])
