"""Running a benchmark's tasks: a prediction is saved as soon as it is made, and a run goes on where the last one stopped.

OUT/POLICY-BUDGET/run.json        what the predictions were made with
OUT/POLICY-BUDGET/TASK.jsonl      a prediction per line, `pred`, in the order of the examples, with what the benchmark's files say of
                                  each: LongBench's own evaluation reads these files
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdsl.budget import spelled
from kvdsl.errors import KvdslError
from kvdsl.files import write_whole
from kvdsl.generation.generate import generate
from kvdsl.generation.models import encode
from kvdsl_lab.eval.benchmarks.tasks import Example, Row, Task, percent
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.usage import Usage


@dataclass(frozen=True)
class Asking:
    """How prompts are put to a model.

    Attributes:
        max_length: tokens of a prompt, from whose middle the rest is cut; None for what the model was made for.
        chat: whether prompts that may have one get the tokenizer's chat template.
        cuts: whether a prompt that is too long is cut, as LongBench's scripts do; it is refused otherwise.
    """

    model: Any
    tokenizer: Any
    max_length: int | None = None
    chat: bool = False
    cuts: bool = True

    def ids(self, task: Task, example: Example) -> list[int]:
        """The prompt's tokens.

        Raises:
            KvdslError: if the chat template alone is longer than what the model was made for, or the prompt, which is not to be cut.
        """
        made_for = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = None if made_for is None else made_for - task.new_tokens
        if not self.cuts:
            whole = self._whole(task, example.prompt)
            if room is not None and len(whole) > room:
                raise KvdslError(
                    f"a prompt of {task.name} has {len(whole)} tokens, and its answer {task.new_tokens}, but the model was made for "
                    f"{made_for}: lay the task out for this model's tokenizer, and shorter"
                )
            return whole
        keep = min((one for one in (self.max_length, room) if one is not None), default=None)
        while keep is None or keep > 1:
            found = self._whole(task, example.prompt if keep is None else cut_middle(self.tokenizer, example.prompt, keep))
            # The template comes on top, and two halves need not have as many tokens together as they had in the text.
            if keep is None or room is None or len(found) <= room:
                return found
            keep -= len(found) - room
        raise KvdslError(
            f"{task.name} needs {task.new_tokens} new tokens, and leaves no room for a prompt in {made_for} tokens"
        )

    def _whole(self, task: Task, prompt: str) -> list[int]:
        if not (self.chat and task.chat):
            return list(self.tokenizer(prompt, verbose=False)["input_ids"])
        message = [{"role": "user", "content": prompt}]
        return encode(
            self.tokenizer, self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        )

    def answer(self, task: Task, example: Example, cache: Any) -> str:
        """What the model writes after the prompt, greedily."""
        stop = [encode(self.tokenizer, "\n")[-1]] if task.one_line else []
        return generate(self.model, self.tokenizer, self.ids(task, example), task.new_tokens, cache, stop).text


def cut_middle(tokenizer: Any, text: str, limit: int) -> str:
    """A text of more than `limit` tokens without its middle: its first and its last `limit // 2` tokens, as LongBench cuts it."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) <= limit:
        return text
    half = limit // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))


# -- running -----------------------------------------------------------------------------------------------------------


def evaluate(
    asking: Asking,
    tasks: Sequence[Task],
    policies: Policies,
    budgets: Sequence[float],
    out: Path,
    facts: Mapping[str, Any],
    *,
    fresh: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for every policy, budget and task: `policy, budget, task, metric, score` (in percent), `examples`; LongBench-E's `by_length`.

    Args:
        facts: whatever else the predictions depend on, for JSON: an earlier run with others is not gone on with.
        fresh: forget the predictions of an earlier run.
        tick: called for every example, also for those that were answered before.

    Raises:
        KvdslError: if predictions of an earlier run are of other examples, or were made with something else.
    """
    folders = [(name, budget, out / _folder(name, budget)) for name, budget in policies.pairs(budgets)]
    for name, _, folder in folders:
        # The package that a policy was compiled to is named by a digest: another text, setting or compiler makes another one.
        digest = policies.classes[name].__module__.partition(".")[0].rpartition("_")[2]
        claim(folder, {"policy": name, "compiled policy": digest, **facts}, fresh=fresh)
    rows: list[Row] = []
    for name, budget, folder in folders:
        for task in tasks:
            usage = Usage()
            found = predict(asking, task, lambda: policies.make(name, asking.model, budget), folder, tick, usage)  # noqa: B023
            scores = [task.score(text, example) for text, example in zip(found, task.examples, strict=True)]
            rows.append({
                "policy": name, "budget": budget, "task": task.name, "metric": task.metric, "score": percent(scores),
                "examples": len(scores), **usage.row(), **({"by_length": task.by_length(scores)} if task.length else {}),
            })  # fmt: skip
    return rows


def predict(
    asking: Asking, task: Task, make_cache: Callable[[], Any], folder: Path, tick: Callable[[], None] = lambda: None,
    usage: Usage | None = None,
) -> list[str]:  # fmt: skip
    """What the model writes for every example of a task; what the folder has of an earlier run is not asked again, nor seen by `usage`."""
    path = folder / f"{task.name}.jsonl"
    found = earlier(path, task)
    with path.open("a", encoding="utf-8") as file:
        for number, example in enumerate(task.examples):
            if number >= len(found):
                cache = make_cache()
                found.append(asking.answer(task, example, cache))
                if usage is not None:
                    usage.see(cache)
                # One write for one line: a killed run leaves at most its last line unfinished.
                file.write(json.dumps({"pred": found[-1], **example.record()}, ensure_ascii=False) + "\n")
                file.flush()
            tick()
    return found


def _folder(policy: str, budget: float | None) -> str:
    """A policy's file may lie anywhere; its name is what the folder is called by."""
    name = re.sub(r"[^\w.-]+", "_", policy).strip("_.")
    return name if budget is None else f"{name}-{spelled(budget)}"


def earlier(path: Path, task: Task) -> list[str]:
    """The predictions of a run of before, of the first examples. A last line that was not finished is removed from the file.

    Raises:
        KvdslError: if they are of other examples.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    finished = data[: data.rfind(b"\n") + 1]
    if len(finished) < len(data):
        os.truncate(path, len(finished))
    found = []
    for number, (line, example) in enumerate(zip(finished.decode().split("\n")[:-1], task.examples, strict=False), 1):
        try:
            whole = json.loads(line)
            found.append(whole.pop("pred"))
        except (ValueError, KeyError, TypeError) as error:
            raise KvdslError(f"{path}, line {number} is no prediction; give another --out, or --fresh") from error
        if whole != example.record():
            raise KvdslError(
                f"{path}, line {number} answers another example than the data have; give another --out, or --fresh"
            )
    return found


def averages(rows: Iterable[Row]) -> list[Row]:
    """The mean score over the tasks for every policy and budget."""
    scores: dict[tuple[str, float | None], list[float]] = {}
    for row in rows:
        scores.setdefault((row["policy"], row["budget"]), []).append(row["score"])
    return [
        {"policy": policy, "budget": budget, "tasks": len(found), "score": round(statistics.fmean(found), 2)}
        for (policy, budget), found in scores.items()
    ]


# -- what a folder belongs to ------------------------------------------------------------------------------------------


def claim(folder: Path, facts: Mapping[str, Any], *, fresh: bool) -> None:
    """Note in the folder what its predictions are made with, or check that those of an earlier run were made with the same.

    Raises:
        KvdslError: if they were made with something else.
    """
    note = folder / "run.json"
    if note.exists():
        if fresh:
            for path in (*folder.glob("*.jsonl"), note):
                path.unlink()
        else:
            _compare(note, facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def _compare(note: Path, facts: Mapping[str, Any]) -> None:
    try:
        before = dict(json.loads(note.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise KvdslError(f"{note} cannot be read; give another --out, or --fresh") from error
    changed = [key for key in sorted({*before, *facts}) if before.get(key) != facts.get(key)]
    if changed:
        told = ", ".join(f"{key} was {before.get(key)}, now {facts.get(key)}" for key in changed)
        raise KvdslError(f"{note.parent} holds another run's predictions ({told}); give another --out, or --fresh")
