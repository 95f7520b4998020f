"""`mine.py:calm`: a policy of a Python file, which is executed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from kvdsl import codes
from kvdsl.diagnostics import DiagnosticError, Sink, did_you_mean, listed
from kvdsl.lang.expressions import MisusedError
from kvdsl.lang.places import Place, place_in
from kvdsl.lang.policies import Policy
from kvdsl.source import SourceFile


def policy_of(path: Path, name: str) -> Policy:
    """Return a policy of a Python file by its name there, or its only policy for an empty name.

    The file is executed, with its folder first on the import path, so name only trusted files.

    Raises:
        DiagnosticError: if the file cannot be read or fails, or has no such policy.
    """
    found = {key: value for key, value in _run(path).items() if isinstance(value, Policy)}
    if name in found:
        return found[name]
    if not name and len({*found.values()}) == 1:
        return next(iter(found.values()))
    several = listed((f"{path.name}:{one}" for one in found), "or") if found else None
    if not name and found:
        raise _refused(f"{path}", f"`{path}` has several policies", f"name one: {several}")
    help = did_you_mean(name, found) or several or "`@kvdsl.policy` makes a policy of a function"
    raise _refused(f"{path}:{name}", f"there is no policy `{name}` in `{path}`" if name else f"`{path}` has no policy", help)


def _run(path: Path) -> Mapping[str, object]:
    """Execute a Python file and return its names. Its output goes to standard error, which keeps standard output clean."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refused(str(path), f"there is no file `{path}`", "paths are relative to the current folder") from None
    module = ModuleType(f"_kvdsl_run_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(data, str(path), "exec", dont_inherit=True), module.__dict__)
    except DiagnosticError:
        raise
    except (Exception, SystemExit) as failure:
        raise _failed(path, failure) from failure
    finally:
        sys.path.remove(str(path.resolve().parent))
        del sys.modules[module.__name__]
    return vars(module)


def _refused(name: str, message: str, help: str) -> DiagnosticError:
    sink = Sink()
    sink.report(codes.NO_SUCH_POLICY, SourceFile("<policy>", name).span(0, len(name)), message, help)
    return DiagnosticError(sink)


def _failed(path: Path, failure: BaseException) -> DiagnosticError:
    """Return an error at the line of a Python file that failed."""
    place = Place(str(path), 1)
    match failure:
        case SyntaxError(filename=name, lineno=line) if name == str(path) and line is not None:
            place = Place(name, line)
    trace = failure.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            place = place_in(trace.tb_frame.f_code, trace.tb_lasti, trace.tb_lineno)
        trace = trace.tb_next
    text = " ".join(str(failure).split())
    sink = Sink()
    match failure:
        case MisusedError(message=message, help=help):
            sink.report(codes.PYTHON, place.span(), message, help)
        case _:
            message = f"this raises `{type(failure).__name__}`{f': {text}' if text else ''}"
            sink.report(codes.PYTHON, place.span(), message)
    return DiagnosticError(sink)
