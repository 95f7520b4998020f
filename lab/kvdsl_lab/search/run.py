"""A whole search: record a model's attention, search, prove what was found on unseen text, and say what came of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from kvdsl.files import write_whole
from kvdsl.ir.nodes import Policy
from kvdsl_lab.search import history, report
from kvdsl_lab.search.evolve import Evolution, Found
from kvdsl_lab.search.judge import Attention, Case, Judge, NextToken, recorded
from kvdsl_lab.search.proof import Contestant, Proof, Row, agreement
from kvdsl_lab.search.space import Bounds, key, seed_of, without_parts
from kvdsl_lab.search.store import Store
from kvdsl_lab.search.workers import Workers

PROOF_PER_BUDGET = 4
"""How much longer than the largest budget the texts of the proof are, at least."""
RECORDED, ROWS = 6, 12
"""Texts that are recorded where attention is judged, at most, and how many layers of theirs are looked at."""

Tell = Callable[[str], None]
Result = dict[str, Any]


@lru_cache(1)
def seeds() -> dict[str, Policy]:
    """The shipped policies that lie in the space, by name; of those that are one there, the one with the shortest name."""
    from kvdsl.compiler import analyse, shipped_policies

    found: dict[Policy, str] = {}
    for path in sorted(shipped_policies(), key=lambda path: (len(path.stem), path.stem)):
        seed = seed_of(analyse(path).policy)
        if seed is not None:
            found.setdefault(seed, path.stem)
    return {name: policy for policy, name in found.items()}


@dataclass(frozen=True)
class Plan:
    """What is searched, and with what.

    Attributes:
        model, dtype: as for `load_model`.
        text: a file; None for the books that ship with kvdsl-lab.
        budgets: tokens, ascending.
        tasks: names of `judge.TASKS`.
        stretches: of unseen text, for the proof.
        texts: stretches that are judged on. On six, chance decided which policy was the best (docs/howto/leaderboard.md).
        choice: another text, as many stretches of which choose the finalists; None: they are the best on what is searched on.
    """

    model: str | None
    dtype: str | None
    text: Path | None
    budgets: tuple[int, ...]
    tasks: tuple[str, ...]
    bounds: Bounds
    seed: int = 0
    stretches: int = 8
    texts: int = 18
    choice: Path | None = None

    @property
    def tokens(self) -> int:
        """Of a stretch."""
        return max(PROOF_PER_BUDGET * self.budgets[-1], *(case.tokens for case in self.cases))

    @property
    def cases(self) -> tuple[Case, ...]:
        """What policies are judged in."""
        return tuple(Case(task, budget) for task in self.tasks for budget in self.budgets)


@dataclass(frozen=True)
class Material:
    """A model, and stretches of a text: the plan's `texts` are judged on, the others prove.

    Attributes:
        text: the plan's `texts` and `stretches`.
        others: as many as its `texts`, on which the finalists are chosen, if another text is given for that.
    """

    model: Any
    text: Stretches
    others: Stretches | None

    @staticmethod
    def of(plan: Plan) -> Material:
        """What a plan asks for.

        Raises:
            KvdslError: if a text is too short for stretches that do not overlap, or a stretch too long for the model.
        """
        from kvdsl.generation.models import check_length, load_model
        from kvdsl.generation.text import read_text
        from kvdsl_lab.assets import all_books
        from kvdsl_lab.eval.linear import widened

        model, tokenizer = load_model(plan.model, plan.dtype)
        model = widened(model)
        check_length(model, plan.tokens)
        text = all_books() if plan.text is None else read_text(plan.text)
        searched = Stretches.of(text, tokenizer, plan.tokens, plan.texts + plan.stretches)
        others = None if plan.choice is None else Stretches.of(read_text(plan.choice), tokenizer, plan.tokens, plan.texts)
        return Material(model, searched, others)


@dataclass(frozen=True)
class Stretches:
    """Of a text, spread over it.

    Attributes:
        ids: int64 [stretches, tokens].
        digest: of the whole text.
    """

    ids: Tensor
    digest: str

    @staticmethod
    def of(text: str, tokenizer: Any, tokens: int, count: int) -> Stretches:
        """So many of so many tokens.

        Raises:
            KvdslError: if they would overlap.
        """
        from kvdsl.generation.models import windows

        return Stretches(windows(tokenizer, text, tokens, count, apart=True), hashlib.sha256(text.encode()).hexdigest()[:16])


def judge_of(plan: Plan, material: Material) -> Judge:
    """Attention in a few layers, and then what the model makes of it; of another text, where there is one, to choose by."""
    ids = material.text.ids[: plan.texts]
    attention = Attention(recorded(material.model, ids[:: -(-plan.texts // RECORDED)], ROWS))
    choice = None if material.others is None else NextToken(material.model, material.others.ids, "other texts")
    return Judge(plan.cases, (attention, NextToken(material.model, ids)), choice)


class Run:
    """One search in a folder."""

    def __init__(self, plan: Plan, material: Material, out: Path, store: Store, judge: Judge | Workers) -> None:
        self._plan, self._material, self._out, self._store, self._judge = plan, material, out, store, judge
        self._begun = time.monotonic()
        self._evolution = Evolution(judge, store, plan.bounds, plan.seed, budgets=plan.budgets)

    def search(self, until: float | None, most: int | None = None, tell: Tell = lambda text: None) -> None:
        """Search until there is no time left (`time.monotonic()`), or so many policies have been had."""

        def tick(evolution: Evolution) -> None:
            best, tried = evolution.population[0], evolution.curve[-1][0]
            tell(f"{tried} policies, error {best.error:.4f}: {report.in_words(best.policy)}")

        self._evolution.until, self._evolution.most, self._evolution.tick = until, most, tick
        self._evolution.run(list(seeds().items()))

    def finish(self, finalists: int, until: float, tell: Tell = lambda text: None) -> Result:
        """Prove the best, write them down, and give the result, for JSON.

        Args:
            finalists: at most so many. The first and the best seed are always proven, others while `until` leaves time.
        """
        evolution = self._evolution
        tell("choosing the finalists")
        chosen = zip(evolution.seeds, evolution.chosen(list(evolution.seeds.values())), strict=True)
        seeded = dict(sorted(chosen, key=lambda named: named[1].error))
        searched = {name: one.error for name, one in evolution.seeds.items()}
        best = evolution.finalists(finalists)
        named = {report.name_of(number + 1): one for number, one in enumerate(best)}
        proven = list(self._proven(seeded, named, until, tell)) if best else []
        ablations = self._ablations(best[0]) if best else []
        ordered = self._agreement(seeded | named, proven)
        return {
            **self._about(), "evaluated": self._store.counts()["tried"], "best": self._best(named | seeded),
            "counts": self._store.counts(), "choosing_hours": self._choosing_hours(),
            "minutes": round((time.monotonic() - self._begun) / 60, 2),
            "curve": evolution.curve, "finalists": [{"name": name, **report.told(one)} for name, one in named.items()],
            "seeds": [
                {"name": name, **report.told(one), "searched_error": round(searched[name], 6)} for name, one in seeded.items()
            ],
            "front": [report.told(one) for one in evolution.front()],
            "ablations": ablations, "proof": report.proof_rows(proven),
            "agreement": ordered,
            "moves": history.moves(self._store, len(self._judge.rungs) - 1),
            "cheap_step": history.cheap_step(self._store, len(self._judge.rungs) - 1),
        }  # fmt: skip

    def _choosing_hours(self) -> float:
        """Of the processor hours those that went into other texts than are searched on."""
        return 0.0 if self._judge.choice is None else round(self._store.hours(self._evolution.choosing), 3)

    def _best(self, found: Mapping[str, Found]) -> Result:
        """The policy with the least error, and where it lies: a file of the folder, or a shipped policy."""
        name, best = min(found.items(), key=lambda named: named[1].error)
        shipped = name in self._evolution.seeds
        return {
            "policy": name, "file": None if shipped else str(self._out / f"{name}.kv"), "objective": round(best.error, 6),
        }  # fmt: skip

    def _about(self) -> Result:
        from kvdsl.environment import environment

        plan, dtype = self._plan, str(self._material.model.dtype).removeprefix("torch.")
        return {
            "environment": environment(dtype=dtype, seed=plan.seed), "model": plan.model or "the reference model",
            "text sha256": self._material.text.digest, "chosen on another text": self._material.others is not None,
            "tasks": list(plan.tasks), "budgets": list(plan.budgets),
            "bounds": asdict(plan.bounds), "seed": plan.seed,
            "tokens": plan.tokens, "stretches": plan.stretches, "texts": plan.texts,
        }  # fmt: skip

    def _proven(self, seeded: Mapping[str, Found], named: Mapping[str, Found], until: float, tell: Tell) -> Iterator[Row]:
        """A row for every policy and budget; the finalists' files are written on the way."""
        for path in self._out.glob("found_[0-9]*.kv"):  # of an earlier choice
            path.unlink()
        for number, (name, one) in enumerate(named.items()):
            about = report.docstring(one, self._about(), seeded)
            write_whole(self._out / f"{name}.kv", report.written(one, number + 1, about))
        ours = [Contestant(name, one.key, self._out / f"{name}.kv", False) for name, one in named.items()]
        theirs = [Contestant(name, f"shipped {name}", name, True) for name in seeded]
        proof = Proof(
            self._material.model, self._material.text.ids[self._plan.texts :], self._material.text.digest, self._store
        )
        first, others = [*ours[:1], *theirs[:1]], [*theirs[1:], *ours[1:]]
        tell(f"reading unseen text through {' and '.join(one.name for one in first)}")
        proof.measure(first, self._plan.budgets)
        if time.monotonic() >= until:
            return proof.rows(first, self._plan.budgets)
        tell(f"reading unseen text through {len(others)} more")
        proof.measure(others, self._plan.budgets)
        return proof.rows([*first, *others], self._plan.budgets)

    def _agreement(self, found: Mapping[str, Found], proven: Sequence[Row]) -> list[Result]:
        """How well each rung orders what was proven as the loss of unseen text does, at the largest budget, in the first task."""
        losses = {row.name: row.loss for row in proven if row.budget == self._plan.budgets[-1]}
        asked = len(self._plan.budgets) - 1
        told = []
        for number, rung in enumerate((*self._judge.rungs, *filter(None, [self._judge.choice]))):
            judged = {name: self._evolution.judged(found[name].policy, "agreement", [], number) for name in losses}
            errors = {name: one.errors[asked] for name, one in judged.items() if one is not None}
            told.append({"rung": rung, "rank_correlation": agreement(errors, losses)})
        return told

    def _ablations(self, best: Found) -> list[Result]:
        """What the judge says of the best without its parts."""
        found = [{"what": "whole", "error": round(best.error, 6)}]
        for what, policy in without_parts(best.policy, self._plan.budgets).items():
            one = self._evolution.judged(policy, "ablation", [best.key], self._evolution.choosing)
            if one is not None:
                found.append({"what": what, "error": round(one.error, 6)})
        return found


@contextmanager
def opened(plan: Plan, out: Path, *, fresh: bool = False, workers: int = 1) -> Iterator[Run]:
    """A search in a folder, ready to begin or to go on.

    Args:
        workers: processes that judge; 1 is this one.

    Raises:
        KvdslError: as `Material.of`, or if the folder has another search.
    """
    from kvdsl_lab.eval.linear import multiplies_in

    material = Material.of(plan)
    facts = {
        "model": plan.model or "reference", "dtype": str(material.model.dtype), "text sha256": material.text.digest,
        "stretches": plan.stretches, "texts": plan.texts, "tasks": list(plan.tasks), "budgets": list(plan.budgets),
        "bounds": asdict(plan.bounds), "seed": plan.seed, "seeds": [key(policy) for policy in seeds().values()],
        "multiplies in": multiplies_in(material.model),
        **({} if material.others is None else {"choice sha256": material.others.digest}),
    }  # fmt: skip
    with ExitStack() as there:
        store = there.enter_context(Store(out / "search.sqlite", facts, fresh=fresh))
        judge = judge_of(plan, material) if workers == 1 else there.enter_context(Workers(plan, workers))
        yield Run(plan, material, out, store, judge)
