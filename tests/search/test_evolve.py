"""The search itself, with a judge that takes no time."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl_lab.search import history
from kvdsl_lab.search.evolve import NICHE, Evolution, Found
from kvdsl_lab.search.moves import numbers
from kvdsl_lab.search.report import in_words
from kvdsl_lab.search.run import seeds
from kvdsl_lab.search.space import Bounds, Size, without_parts
from kvdsl_lab.search.store import Store

FACTS = {"model": "stub", "seed": 0}


class Stub:
    """Likes values, and a quarter of the budget for what is recent; the first rung knows only the values."""

    cases, rungs = (16, 32), ("values", "both")

    def __init__(self, choice: str | None = None) -> None:
        self.calls, self.choice = 0, choice

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        self.calls += len(policies)
        return [self._errors(policy, rung) for policy in policies]

    def processor_time(self) -> float:
        return float(self.calls)

    def _errors(self, policy: Policy, rung: int) -> list[float]:
        text = in_words(policy)
        shares = [float(share) for share in re.findall(r"keep last ([\d.]+) \* budget", text)]
        if rung == len(self.rungs):  # the choice: the more for what is recent, the better
            return [budget * (2.0 - sum(shares)) for budget in self.cases]
        recent = min((abs(share - 0.25) for share in shares), default=1.0)
        own = zlib.crc32(text.encode()) / 2**37  # no two policies do the same
        return [budget * (2.0 - ("(v)" in text) + rung * recent) + 0.01 * len(text) + own for budget in self.cases]


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    """A store that does not wait for the disk, which would take most of the time."""
    with Store(path, FACTS) as store:
        store._database.execute("pragma synchronous = off")
        yield store


def search(path: Path, most: int, *, seed: int = 0, until: float | None = None) -> tuple[Evolution, Stub]:
    judge = Stub()
    with opened(path) as store:
        found = Evolution(judge, store, Bounds(), seed, until, most)
        found.run([(name, seeds()[name]) for name in ("h2o", "tova", "vatp_h2o")])
    return found, judge


def test_it_finds_what_its_judge_likes(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a.sqlite", 600)
    best, began = found.population[0], min(found.seeds.values(), key=lambda one: one.error)
    assert best.error < began.error
    assert "(v)" in in_words(best.policy)
    assert [keep.scope for keep in best.policy.keeps] == ["last"]
    assert numbers(best.policy)[-1][1] == pytest.approx(0.25, abs=0.1)
    errors = [error for _, error in found.curve]
    assert errors == sorted(errors, reverse=True) and errors[-1] <= best.error
    assert [one.weighed for one in found.population] == sorted(one.weighed for one in found.population)


def test_policies_of_other_bytes_do_not_drive_one_out(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a.sqlite", 300)
    small = min((one for one in found.population if one.size.state_bytes == 4), key=lambda one: one.weighed)
    larger = [replace(one, key=f"{number}", size=replace(one.size, state_bytes=8), errors=(number / 1e3, number / 1e3))
              for number, one in enumerate([found.population[0]] * 9, 1)]  # fmt: skip
    found._survive(larger)
    assert small in found.population
    assert sum(one.size.state_bytes == 8 for one in found.population) == NICHE
    assert found.population[0].key == "1"


def test_of_equal_errors_the_policy_with_fewer_operations_is_ahead(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a.sqlite", 3)
    best = found.population[0]
    longer = replace(best, key="longer", size=replace(best.size, nodes=best.size.nodes + 20),
                     errors=tuple(error * 0.99 for error in best.errors))  # fmt: skip
    shorter = replace(longer, key="shorter", size=replace(best.size, nodes=best.size.nodes + 5))
    assert shorter.weighed < best.weighed < longer.weighed


def test_a_seed_decides_it(tmp_path: Path) -> None:
    one, other, third = (search(tmp_path / name, 80, seed=seed)[0] for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert one.curve == other.curve and one.population == other.population
    assert one.population != third.population


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, measured = search(tmp_path / "whole", 120)
    _, first = search(tmp_path / "parts", 60)
    rest, second = search(tmp_path / "parts", 120)
    assert rest.population == whole.population and rest.curve == whole.curve
    assert first.calls + second.calls == measured.calls, "nothing is judged twice"


def test_without_time_it_has_the_seeds(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a", 300, until=time.monotonic() - 1)
    assert sorted(found.seeds) == ["h2o", "tova", "vatp_h2o"] and len(found.population) == 3


def test_finalists_are_the_best_of_their_size_and_as_simple_as_can_be(tmp_path: Path) -> None:
    judge = Stub()
    with opened(tmp_path / "a") as store:
        found = Evolution(judge, store, Bounds(), 0, None, 200)
        found.run([(name, seeds()[name]) for name in ("h2o", "tova", "vatp_h2o")])
        finalists = found.finalists(3)
        seeded = {one.key for one in found.seeds.values()}
        assert 1 <= len(finalists) <= 3 and not seeded & {one.key for one in finalists}
        assert finalists[0].error <= found.population[0].error * 1.002
        for one in finalists:
            for simpler in without_parts(one.policy).values():
                told = found.judged(simpler, "test", [], 1)
                assert told is None or told.error > one.error * 1.002, "it could be simpler"


def test_finalists_are_chosen_on_another_text(tmp_path: Path) -> None:
    judge = Stub("another text")
    with opened(tmp_path / "a") as store:
        found = Evolution(judge, store, Bounds(), 0, None, 120)
        found.run([(name, seeds()[name]) for name in ("h2o", "tova", "vatp_h2o")])
        alone, _ = search(tmp_path / "b", 120)
        assert found.population == alone.population, "what is searched on alone decides where the search goes"
        errors = [one.error for one in found.chosen(found.population)]
        (finalist,) = found.finalists(1)
    assert finalist.error == min(errors) < errors[0], "the best there, which is not the best of the search"


def test_the_same_in_other_words_stands_once_however_it_is_rounded(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a.sqlite", 3)
    best = found.population[0]
    again = replace(best, key="other words", errors=tuple(error * (1 + 1e-7) for error in best.errors))
    other = replace(best, key="another", errors=tuple(error * (1 + 1e-3) for error in best.errors))
    before = len(found.population)
    found._survive([again, other])
    assert len(found.population) == before + 1
    assert {"other words", "another"} & {one.key for one in found.population} == {"another"}


def test_a_longer_policy_with_the_same_errors_does_not_drive_the_best_out(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a.sqlite", 3)
    one = found.population[0]

    def with_error(key: str, error: float, nodes: int) -> Found:
        return replace(one, key=key, errors=(error, error), size=Size(16, nodes))

    found.population = [with_error("best", 0.1, 3), *(with_error(f"{n}", 0.1005 + n / 1e4, 3) for n in range(NICHE - 1))]
    found._survive([with_error("in other words", 0.1, 20), with_error("new", 0.10055, 3)])
    assert [one.key for one in found.population[:3]] == ["best", "0", "new"] and len(found.population) == NICHE


def test_who_climbs(tmp_path: Path) -> None:
    """Who is not far behind its niche, and does not what another did."""
    found, judge = search(tmp_path / "a.sqlite", 300)
    with Store(tmp_path / "a.sqlite", FACTS) as store:
        found.store = store
        size = found.population[0].size.state_bytes
        niche = [one for one in found.population if one.size.state_bytes == size]
        assert len(niche) == NICHE
        last = max(Stub()._errors(one.policy, 0)[0] for one in niche)
        near, same, far = (
            replace(niche[0], key=key, errors=(last * factor, 2 * last * factor))
            for key, factor in (("near", 1.05), ("same", 1.05 * (1 + 1e-7)), ("far", 1.2))
        )
        before = judge.calls
        assert found._climbs(near)
        assert not any(map(found._climbs, (near, same, far, replace(niche[0], key="none", errors=(float("inf"), 1.0)))))
        found.population = niche[1:]
        assert found._climbs(far), "there is room"
        assert judge.calls == before


def test_a_front(tmp_path: Path) -> None:
    found, _ = search(tmp_path / "a", 100)

    def costs(one: Found) -> tuple[float, ...]:
        return (*one.errors, one.size.state_bytes, one.size.nodes)

    front = found.front()
    assert found.population[0] in front
    for one in front:
        assert not any(all(a <= b for a, b in zip(costs(other), costs(one), strict=True)) and costs(other) != costs(one)
                       for other in found.population)  # fmt: skip


def test_what_the_database_tells_of_moves_and_steps(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        for key, move, parents, size, errors in (
            ("a", "seed h2o", [], Size(4, 3), (0.1, 0.4)),
            ("b", "node", ["a"], Size(4, 3), (0.2, 0.3)),
            ("c", "statements", ["a", "b"], Size(4, 3), (0.3, 0.35)),
            ("d", "statements", ["a", "c"], Size(4, 3), (0.4, 0.2)),
            ("e", "node", ["a"], Size(4, 3), (0.5, None)),
            ("f", "node", ["a"], None, (None, None)),
        ):
            store.add(key, "", move, parents, size)
            for rung, error in enumerate(errors):
                if error is not None:
                    store.judge(key, rung, ["text 16", "prompt 16"], [error / 2, error * 2], 0.0)
        assert history.moves(store, 1) == [
            {"move": "node", "tried": 3, "admitted": 2, "climbed": 1, "better": 1},
            {"move": "statements", "tried": 2, "admitted": 2, "climbed": 2, "better": 1},
        ]
        step = history.cheap_step(store, 1)
        assert step["policies"] == 4 and step["rank_correlation"] == pytest.approx(-0.8)


def test_the_file_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.sqlite"
    Store(path, FACTS).__exit__()
    with pytest.raises(KvdslError, match="is of another search: seed was 0"):
        Store(path, {**FACTS, "seed": 1})
    Store(path, {**FACTS, "seed": 1}, fresh=True).__exit__()
    with Store(path, FACTS, fresh=True) as store:
        store._database.execute("pragma user_version = 1")
    with pytest.raises(KvdslError, match="was begun by a kvdsl whose search goes another way"):
        Store(path, FACTS)
    path.write_text("no database, but a text that is long enough to be taken for one" * 10)
    with pytest.raises(KvdslError, match="cannot be used"):
        Store(path, FACTS)
