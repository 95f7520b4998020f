"""Check `tensor` statements: axes and files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean, listed
from kvdsl.helps import Help, instead
from kvdsl.ir import nodes as ir
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.tensorfile import AXES


def check_tensor(statement: syn.Tensor, source: SourceFile, sink: Sink) -> ir.Tensor | None:
    """Check a `tensor` statement; None after a report. The compiler checks that the file exists when it builds a package."""
    path = _path(statement.file, source, sink)
    if not _has_axes(statement, sink) or path is None:
        return None
    axes = tuple(word.text for word in statement.axes)
    return ir.Tensor(name=statement.name.text, axes=axes, file=statement.file.text, path=str(path))


def _has_axes(statement: syn.Tensor, sink: Sink) -> bool:
    seen: set[str] = set()
    for word in statement.axes:
        if word.text not in AXES:
            help = did_you_mean(word.text, AXES) or f"the axes are {listed(AXES, 'and')}"
            sink.report(codes.TENSOR, word.span, f"a tensor has no axis `{word.text}`", help)
            return False
        if word.text in seen:
            sink.report(codes.TENSOR, word.span, f"the axis `{word.text}` is named twice")
            return False
        seen.add(word.text)
    if "group" in seen and not {"heads", "dims"} <= seen:
        group = next(word for word in statement.axes if word.text == "group")
        message = "a tensor with the axis `group`, the query heads of a KV head, also needs `heads` and `dims`"
        sink.report(codes.TENSOR, group.span, message, _axes(statement, "[layers, heads, group, dims]"))
        return False
    if "rank" in seen and "dims" not in seen:
        rank = next(word for word in statement.axes if word.text == "rank")
        message = "`rank` is the axis that `dims` are projected to, but this tensor has no `dims`"
        sink.report(codes.TENSOR, rank.span, message, _axes(statement, "[layers, heads, dims, rank]"))
        return False
    return True


def _axes(statement: syn.Tensor, axes: str) -> Help:
    """Return a help with axes that a tensor could have."""
    first, last = statement.axes[0].span, statement.axes[-1].span
    return instead(f"for example `{axes}`", axes.strip("[]"), first.to(last))


def _path(word: syn.Word, source: SourceFile, sink: Sink) -> Path | None:
    """Return the file's path, which must lie in the folder of the .kv file even after following links."""
    name, span = word.text, word.span
    parts = PurePosixPath(name).parts
    if not name.endswith(".safetensors") or name.startswith(("/", "\\")) or ".." in parts or set(name) & set("\\:"):
        stem = PurePosixPath(name.replace(chr(92), "/")).stem or "filter"
        more = ", which `safetensors.numpy.save_file` writes" if "." in name and not name.endswith(".safetensors") else ""
        help = instead(f'for example `from "{stem}.safetensors"`{more}', f'"{stem}.safetensors"')
        message = "a tensor's file is a relative path to a .safetensors file in the folder of the policy"
        sink.report(codes.TENSOR_FILE, span, message, help)
        return None
    if not name.isprintable():
        sink.report(codes.TENSOR_FILE, span, "the path has characters that cannot be printed")
        return None
    if source.path is None:
        message = "this policy is not in a file, so a tensor's path has no folder to start from"
        sink.report(codes.TENSOR_FILE, span, message, "save the policy in a .kv file next to the tensor's, and load that")
        return None
    folder = source.path.resolve().parent
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError):
        path = folder.parent
    if not path.is_relative_to(folder):
        sink.report(codes.TENSOR_FILE, span, f"`{name}` is outside the folder of the policy", "copy the file into it")
        return None
    return path
