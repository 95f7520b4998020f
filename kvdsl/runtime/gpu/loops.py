"""Innermost loops of a compiled kernel, read from its disassembly: how many instructions one round takes, and how wide its loads are.

Both makers' texts have the same parts under other names: labels, branches to them, and lines of the source. A branch back to a label
closes a loop; one that has another inside is left out, because its time is the inner one's. Of a round the shortest way is counted: what a
branch may skip, as the cap of logits that most models do not have, is not on it.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Syntax:
    """How one maker's disassembly writes what is looked for.

    Attributes:
        label, instruction, line: patterns of whole lines; an instruction's groups are its name and its operands, a line's its file
            (for AMD its number) and its number. file: a pattern that names the files that lines give by number, if they do.
        always, maybe: names of branches that are always taken, or under a condition.
        loads: a pattern of loads from global memory. widths: what tells their bits, the first that is found; else 32.
        products, barrier: patterns of products of matrices, and of barriers.
    """

    label: str
    instruction: str
    line: str
    file: str | None
    always: str
    maybe: str
    loads: str
    widths: tuple[tuple[str, int], ...]
    products: str
    barrier: str


NVIDIA = Syntax(
    label=r"^(\.L_x_\d+):",
    instruction=r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);",
    line=r'^\s*//## File "([^"]+)", line (\d+)',
    file=None,
    always=r"^BRA$",
    maybe=r"^BRA$",
    loads=r"^(LDG|LDGSTS)\.",
    widths=((r"\.128", 128), (r"\.64", 64), (r"\.[US]16", 16), (r"\.[US]8", 8)),
    products=r"^[HI]?(GMMA|MMA)|^HGMMA",
    barrier=r"^BAR\.SYNC",
)
AMD = Syntax(
    label=r"^(\.LBB\d+_\d+):",
    instruction=r"^\s+()([a-z]\w+)\s*([^;]*)",
    line=r"^\s*\.loc\s+(\d+)\s+(\d+)",
    file=r'^\s*\.file\s+(\d+)\s+"([^"]*)"\s+"([^"]*)"',
    always=r"^s_branch$",
    maybe=r"^s_cbranch_(?!execz)",  # that one skips what no lane does: in the loops here some lane does
    loads=r"^(global|buffer|flat)_load_",
    widths=((r"x4", 128), (r"x3", 96), (r"x2", 64), (r"[us]short", 16), (r"[us]byte", 8)),
    products=r"^v_(s?mfma|wmma)_",
    barrier=r"^s_barrier",
)


@dataclass(frozen=True)
class Loop:
    """One innermost loop.

    Attributes:
        name: the function that has it, and what the comment above it says, if anything.
        instructions: of one warp, in one round.
        loads: how many of its loads from global memory have how many bits.
        products, barriers: likewise how many of its instructions are such.
    """

    name: str
    instructions: int
    loads: dict[int, int]
    products: int
    barriers: int

    def loaded(self, threads: int) -> int:
        """Bytes that a program of so many threads asks for in one round."""
        return sum(bits * count for bits, count in self.loads.items()) * threads // 8


@dataclass(frozen=True)
class _Step:
    name: str
    target: str | None
    always: bool
    where: tuple[str, int] | None


def loops(text: str, syntax: Syntax) -> list[Loop]:
    """The innermost loops of one kernel, in their order.

    Args:
        text: what `nvdisasm -g -c` prints of a cubin, or AMD's assembly.
    """
    steps, labels = _read(text, syntax)
    spans = sorted(
        {
            (labels[step.target], end)
            for end, step in enumerate(steps)
            if step.target and labels.get(step.target, end + 1) < end
        }
    )
    inner = [span for span in spans if not any(_within(other, span) for other in spans)]
    return [_loop(steps, labels, span, syntax) for span in inner]


def _within(other: tuple[int, int], span: tuple[int, int]) -> bool:
    return other != span and span[0] <= other[0] and other[1] <= span[1]


def _read(text: str, syntax: Syntax) -> tuple[list[_Step], dict[str, int]]:
    """The instructions, and before which of them each label stands."""
    steps: list[_Step] = []
    labels: dict[str, int] = {}
    files: dict[str, str] = {}
    where: tuple[str, int] | None = None
    for line in text.splitlines():
        if syntax.file and (match := re.match(syntax.file, line)):
            files[match[1]] = f"{match[2]}/{match[3]}"
        elif match := re.match(syntax.line, line):
            where = (files.get(match[1], match[1]), int(match[2]))
        elif match := re.match(syntax.label, line):
            labels[match[1]] = len(steps)
        elif match := re.match(syntax.instruction, line):
            steps.append(_step(match, where, syntax))
    return steps, labels


def _step(match: re.Match[str], where: tuple[str, int] | None, syntax: Syntax) -> _Step:
    name = match[2]
    always = bool(re.match(syntax.always, name)) and not match[1]
    target = re.search(r"\.L\w+", match[3]) if re.match(syntax.maybe, name) or re.match(syntax.always, name) else None
    return _Step(name, target and target[0], always, where)


def _loop(steps: list[_Step], labels: dict[str, int], span: tuple[int, int], syntax: Syntax) -> Loop:
    names = [steps[n].name for n in _shortest(steps, labels, *span)]
    loads = Counter(_bits(name, syntax) for name in names if re.match(syntax.loads, name))
    return Loop(
        name=_name(steps[n].where for n in (span[1], *range(*span))),
        instructions=len(names),
        loads=dict(sorted(loads.items(), reverse=True)),
        products=sum(bool(re.match(syntax.products, name)) for name in names),
        barriers=sum(bool(re.match(syntax.barrier, name)) for name in names),
    )


def _bits(name: str, syntax: Syntax) -> int:
    return next((bits for pattern, bits in syntax.widths if re.search(pattern, name)), 32)


def _shortest(steps: list[_Step], labels: dict[str, int], first: int, last: int) -> list[int]:
    """The instructions of the shortest way through a round; some of its blocks may lie behind it."""
    before: dict[int, int] = {first: first}
    waiting = deque([first])
    while waiting:
        here = waiting.popleft()
        if here == last:
            break
        step = steps[here]
        nexts = [] if step.always else [here + 1]
        nexts += [labels[step.target]] if step.target in labels else []
        for there in nexts:
            if there < len(steps) and there not in before:
                before[there] = here
                waiting.append(there)
    if last not in before:  # the way in is not the label that the branch goes back to
        return list(range(first, last + 1))
    way = [last]
    while way[-1] != first:
        way.append(before[way[-1]])
    return way[::-1]


# -- what a loop is called ---------------------------------------------------------------------------------------------


def _name(places: Iterable[tuple[str, int] | None]) -> str:
    """By the source line of its branch back, or else by the first of its lines that has a source."""
    for place in places:
        if place is not None and place[1] > 0 and (source := _source(Path(place[0]))) is not None:
            return _described(source.read_text(encoding="utf-8").splitlines(), place[1])
    return "?"


def _source(path: Path) -> Path | None:
    """The file, or the one of its name here: a kernel may have been compiled from another checkout. Triton's own files name nothing."""
    if "triton" in path.parent.parts:
        return None
    return next((file for file in (path, Path(__file__).with_name(path.name)) if file.is_file()), None)


def _described(lines: list[str], number: int) -> str:
    """`function: the comment above line `number` in it`, or the function alone."""
    comment = ""
    for line in _upwards(lines, number):
        if match := re.match(r"\s*def (\w+)", line):
            return f"{match[1]}: {comment}" if comment else match[1]
        if not comment and (match := re.match(r"\s*# (.+)", line)):
            comment = match[1].rstrip(".")
    return "?"


def _upwards(lines: list[str], number: int) -> Iterator[str]:
    return reversed(lines[:number])
