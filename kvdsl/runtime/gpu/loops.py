"""Innermost loops of a compiled kernel, read from its disassembly: instructions per iteration, and widths of loads.

NVIDIA's and AMD's disassemblies contain labels, branches, and source lines, each in its own syntax. A branch back to a label closes a loop.
Loops that contain another are left out, because the inner one dominates their time. Counts follow the shortest path through an iteration:
code that a branch may skip does not count, such as the logit cap that most models lack.

For NVIDIA it also counts round trips to memory. A warp issues its instructions in order and stops at the first one that needs what a load,
an atomic or a copy to shared memory has not brought yet. So each of those counts as one round trip, and everything else as none.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Syntax:
    """One vendor's disassembly syntax, as regular expressions.

    Attributes:
        label, instruction, line: patterns of whole lines. Groups of an instruction: predicate, name, operands. Groups of a source line:
            file (for AMD its number), line number. file: maps file numbers to names, if source lines contain numbers.
        always, maybe: names of unconditional and of conditional branches.
        loads: names of loads from global memory. widths: patterns and their bits, the first match counts; 32 bits without a match.
        products, barrier: names of matrix products and of barriers. ordered: whether `_Warp` understands its instructions.
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
    ordered: bool


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
    ordered=True,
)
AMD = Syntax(
    label=r"^(\.LBB\d+_\d+):",
    instruction=r"^\s+()([a-z]\w+)\s*([^;]*)",
    line=r"^\s*\.loc\s+(\d+)\s+(\d+)",
    file=r'^\s*\.file\s+(\d+)\s+"([^"]*)"\s+"([^"]*)"',
    always=r"^s_branch$",
    maybe=r"^s_cbranch_(?!execz)",  # execz skips code if no lane is active; in these loops some lane always is
    loads=r"^(global|buffer|flat)_load_",
    widths=((r"x4", 128), (r"x3", 96), (r"x2", 64), (r"[us]short", 16), (r"[us]byte", 8)),
    products=r"^v_(s?mfma|wmma)_",
    barrier=r"^s_barrier",
    ordered=False,
)


@dataclass(frozen=True)
class Loop:
    """One innermost loop.

    Attributes:
        name: its function, and the comment above the loop, if any.
        instructions: per warp and iteration.
        loads: number of loads from global memory, by bits per thread.
        products, barriers: number of matrix products and of barriers per iteration.
        trips: round trips to memory that a warp waits for per iteration; None for AMD.
    """

    name: str
    instructions: int
    loads: dict[int, int]
    products: int
    barriers: int
    trips: float | None

    def loaded(self, threads: int) -> int:
        """Return the bytes that a program of `threads` threads loads per iteration."""
        return sum(bits * count for bits, count in self.loads.items()) * threads // 8


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        loops: its innermost loops, in program order. instructions: all that it has, loops once.
        chain: round trips that a warp waits for which passes every instruction once; None for AMD.
    """

    loops: list[Loop]
    instructions: int
    chain: int | None


@dataclass(frozen=True)
class _Step:
    name: str
    guard: str
    operands: str
    target: str | None
    always: bool
    where: tuple[str, int] | None


def code(text: str, syntax: Syntax) -> Code:
    """Read a kernel from the output of `nvdisasm -g -c` for a cubin, or from AMD assembly."""
    steps, labels = _read(text, syntax)
    chain = round(_trips(steps)) if syntax.ordered else None
    return Code(_innermost(steps, labels, syntax), len(steps), chain)


def _innermost(steps: list[_Step], labels: dict[str, int], syntax: Syntax) -> list[Loop]:
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
    """Return the instructions, and each label's index among them."""
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
    return _Step(name, match[1] or "", match[3], target and target[0], always, where)


def _loop(steps: list[_Step], labels: dict[str, int], span: tuple[int, int], syntax: Syntax) -> Loop:
    way = [steps[n] for n in _shortest(steps, labels, *span)]
    names = [step.name for step in way]
    loads = Counter(_bits(name, syntax) for name in names if re.match(syntax.loads, name))
    return Loop(
        name=_name(steps[n].where for n in (span[1], *range(*span))),
        instructions=len(names),
        loads=dict(sorted(loads.items(), reverse=True)),
        products=sum(bool(re.match(syntax.products, name)) for name in names),
        barriers=sum(bool(re.match(syntax.barrier, name)) for name in names),
        trips=_trips(way * (2 * _SETTLED)) / _SETTLED - _trips(way * _SETTLED) / _SETTLED if syntax.ordered else None,
    )


def _bits(name: str, syntax: Syntax) -> int:
    return next((bits for pattern, bits in syntax.widths if re.search(pattern, name)), 32)


def _shortest(steps: list[_Step], labels: dict[str, int], first: int, last: int) -> list[int]:
    """Return the indices of the instructions on the shortest path through an iteration. Its blocks may lie past `last`."""
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
    if last not in before:  # no path leads from the label to the branch: count the whole span
        return list(range(first, last + 1))
    way = [last]
    while way[-1] != first:
        way.append(before[way[-1]])
    return way[::-1]


# -- round trips -------------------------------------------------------------------------------------------------------

_SETTLED = 8
"""Iterations after which a loop's waits repeat: more than tiles are in flight."""

_REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)(\.64)?")
_WRITES_NOTHING = re.compile(r"^(ST|RED|BAR|BRA|EXIT|WARPSYNC|DEPBAR|LDGSTS|LDGDEPBAR|MEMBAR|ERRBAR|CCTL)")
_FROM_MEMORY = re.compile(r"^(LDG|ATOM|LDL)(?!STS|DEPBAR)")


@dataclass
class _Warp:
    """A warp that issues instructions in order.

    Attributes:
        now: round trips waited for so far. ready: when each register's value arrives. copies: when each group of copies to shared memory
            arrives. begun: when those that no group has yet arrive.
    """

    now: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    copies: list[float] = field(default_factory=list)
    begun: float = 0.0

    def issue(self, step: _Step) -> None:
        """Wait for what the instruction needs, and begin it."""
        written, named = _registers(step)
        self.now = max(self.now, *(self.ready.get(register, 0.0) for register in named), 0.0)
        if step.name.startswith("LDGSTS"):
            self.begun = self.now + 1
        elif step.name == "LDGDEPBAR":
            self.copies.append(max(self.begun, self.now))
        elif step.name.startswith("DEPBAR"):
            left = int(step.operands.rpartition(",")[2], 0)
            arrived, self.copies = (self.copies[:-left], self.copies[-left:]) if left else (self.copies, [])
            self.now = max(self.now, *arrived, 0.0)
        arrives = self.now + 1 if _FROM_MEMORY.match(step.name) else self.now
        self.ready.update(dict.fromkeys(written, arrives))


def _trips(steps: Iterable[_Step]) -> float:
    warp = _Warp()
    for step in steps:
        warp.issue(step)
    return warp.now


def _registers(step: _Step) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction writes, and all that it names: it waits for those that it overwrites too."""
    operands = step.operands.split(",")
    first = 0 if _WRITES_NOTHING.match(step.name) else 1
    if first and ("SETP" in step.name or step.name.startswith("ATOM")):
        first = 2
    wide = 4 if "MMA" in step.name or re.search(r"\.128|M88\.4|MT88\.4", step.name) else 2 if ".64" in step.name else 1
    written = {one for operand in operands[:first] for one in _named(operand, wide)}
    read = {one for operand in operands[first:] for one in _named(operand, 4 if "MMA" in step.name else 1)}
    if step.name.startswith("ST"):
        read |= _named(operands[-1], wide)
    return written, written | read | _named(step.guard, 1)


def _named(operand: str, wide: int) -> set[str]:
    """Return the registers of an operand. Each stands for `wide` of them, and an address for two."""
    return {
        f"{kind}{int(number) + n}"
        for kind, number, pair in _REGISTER.findall(operand)
        for n in range(2 if pair else wide if kind == "R" else 1)
    }


# -- names of loops ----------------------------------------------------------------------------------------------------


def _name(places: Iterable[tuple[str, int] | None]) -> str:
    """Return the loop's name, from the first place whose source exists; the branch back comes first."""
    for place in places:
        if place is not None and place[1] > 0 and (source := _source(Path(place[0]))) is not None:
            return _described(source.read_text(encoding="utf-8").splitlines(), place[1])
    return "?"


def _source(path: Path) -> Path | None:
    """Return the file, or the file of that name in this folder: a kernel may come from another checkout. None for Triton's own files."""
    if "triton" in path.parent.parts:
        return None
    return next((file for file in (path, Path(__file__).with_name(path.name)) if file.is_file()), None)


def _described(lines: list[str], number: int) -> str:
    """Return `function: comment` for a line: the function around it, and the nearest comment above; without one the function alone."""
    comment = ""
    for line in reversed(lines[:number]):
        if match := re.match(r"\s*def (\w+)", line):
            return f"{match[1]}: {comment}" if comment else match[1]
        if not comment and (match := re.match(r"\s*# (.+)", line)):
            comment = match[1].rstrip(".")
    return "?"
