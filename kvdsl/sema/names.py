"""Which names are allowed: they become names in Python and C++, and of files."""

from __future__ import annotations

import keyword
from itertools import pairwise

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.helps import offer
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn

MAX_LENGTH = 64

_CPP_KEYWORDS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return co_yield
    compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast enum explicit
    export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr operator or_eq
    private protected public register reinterpret_cast requires short signed sizeof static static_assert static_cast struct switch
    template this thread_local throw true typedef typeid typename union unsigned using virtual void volatile wchar_t xor
    xor_eq NULL NAN INFINITY EOF errno assert
"""

_CLASS_NAMES = """
    self cls super model backend seed config device dtype threads args kwargs mode cache layer_idx positions state reset
    release storage rope kv_dtype
"""

_BUILT_IN = NAMED_INPUTS | NAMED_FUNCTIONS
_CPP = frozenset(_CPP_KEYWORDS.split())
_RESERVED = frozenset(_CLASS_NAMES.split())


def problem(name: str, kind: str) -> str | None:
    """Return why a name cannot be used for a param, policy, package or let; None if it can."""
    if len(name) > MAX_LENGTH:
        return f"the name `{name[:20]}…` is longer than {MAX_LENGTH} characters"
    if "__" in name or (name.startswith("_") and name[1:2].isupper()):
        return f"`{name}` is reserved: names have no `__`, and no `_` before a capital"
    if kind != "name" and keyword.iskeyword(name):  # names of lets are inlined, so generated code does not contain them
        return f"`{name}` is a keyword of Python, where {_BECOMES[kind]}"
    if kind in ("param", "unit", "tensor", "given") and name in _CPP:
        return f"`{name}` is a keyword of C++, where {_BECOMES[kind]}"
    if kind in ("param", "given") and name in _RESERVED:
        return f"`{name}` is an attribute or argument of every cache class"
    return None


_BECOMES = {
    "param": "the param becomes an argument",
    "unit": "the unit would be printed",
    "tensor": "the tensor is read",
    "given": "the value becomes an argument",
    "policy": "the policy becomes a class",
    "package": "the file's name becomes a package",
}


def check_name(word: syn.Word, kind: str, sink: Sink) -> bool:
    """Return whether a name can be used; report it otherwise."""
    found = problem(word.text, kind)
    if found is not None:
        sink.report(codes.BAD_NAME, word.span, found, "choose another name")
    return found is None


def check_stem(source: SourceFile, sink: Sink) -> None:
    """Report a file whose stem cannot name a package."""
    found = stem_problem(source.stem)
    if found is not None:
        help = "rename the file: its stem consists of letters, digits and `_`"
        sink.report(codes.BAD_NAME, source.span(0, 0), found, help)


def stem_problem(stem: str) -> str | None:
    """Return why a file with this stem cannot hold a policy; None if it can."""
    found = problem(stem, "package")
    if found is None and not (stem.isascii() and stem.isidentifier()):
        return f"the file's name `{stem}` cannot be the name of a package"
    return found


def check_definition(statement: syn.Named, sink: Sink) -> bool:
    """Return whether the names that a statement defines are allowed; report them otherwise."""
    name = statement.name
    if name.text in _BUILT_IN and not (name.text == "budget" and statement.keyword == "param"):
        kind = "function" if name.text in NAMED_FUNCTIONS else "input"
        help = offer(f"choose another name, `my_{name.text}`", ", say")
        sink.report(codes.BUILTIN, name.span, f"`{name.text}` is a built-in {kind} and cannot be redefined", help)
        return False
    match statement:
        case syn.Param(unit=unit):
            return check_name(name, "param", sink) and (unit is None or check_name(unit, "unit", sink))
        case syn.Tensor():
            return check_name(name, "tensor", sink)
        case syn.Given():
            return check_name(name, "given", sink)
        case syn.Let(parameters=parameters):
            return check_name(name, "name", sink) and _check_parameters(parameters or (), sink)


def _check_parameters(parameters: tuple[syn.Parameter, ...], sink: Sink) -> bool:
    seen: set[str] = set()
    for parameter in parameters:
        word = parameter.name
        if not check_name(word, "name", sink):
            return False
        if word.text in _BUILT_IN:
            sink.report(codes.BUILTIN, word.span, f"`{word.text}` is built in and cannot be an argument's name")
            return False
        if word.text in seen:
            sink.report(codes.DUPLICATE, word.span, f"the argument `{word.text}` is named twice")
            return False
        seen.add(word.text)
    for before, after in pairwise(parameters):
        if before.default is not None and after.default is None:
            message = f"the argument `{after.name.text}` has no default, but `{before.name.text}` before it has one"
            sink.report(codes.ARGUMENTS, after.span, message, "give it one as well, or put it first")
            return False
    return True
