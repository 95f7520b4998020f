"""Read a source text from a path. The result is always a text or a diagnostic."""

from __future__ import annotations

from pathlib import Path

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.source import SourceFile, Span

MAX_BYTES = 32_768


def read_source(source: SourceFile | Path | str, sink: Sink) -> SourceFile | None:
    """Return a given text, or that of the file at a path; None after a report."""
    if isinstance(source, SourceFile):
        return normalized(source, sink)
    return read(Path(source), sink, name=str(source))


def read(
    path: Path, sink: Sink, name: str | None = None, blame: Span | None = None, help: str | None = None
) -> SourceFile | None:
    """Return the text of a file, or None after a report at `blame`, the import that names it."""
    name = str(path) if name is None else name
    data = read_bytes(path, sink, name, blame, help)
    return None if data is None else decode(data, sink, name, path, blame)


def read_bytes(path: Path, sink: Sink, name: str, blame: Span | None = None, help: str | None = None) -> bytes | None:
    """Return a file's bytes, or None after a report."""
    place = SourceFile(name, "", path).span(0, 0) if blame is None else blame
    try:
        if path.is_dir():
            raise IsADirectoryError
        if path.exists() and not path.is_file():
            raise PermissionError
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = _REASONS.get(type(error), "it cannot be read")
        sink.report(codes.UNREADABLE, place, f"cannot read `{name}`: {reason}", help)
        return None
    if len(data) > MAX_BYTES:
        _too_large(place, name, sink)
        return None
    return data


_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "there is no such file",
    IsADirectoryError: "it is a folder",
    NotADirectoryError: "a part of its path is not a folder",
    PermissionError: "permission denied",
}


def decode(data: bytes, sink: Sink, name: str, path: Path | None = None, blame: Span | None = None) -> SourceFile | None:
    """Decode bytes as UTF-8; None after a report."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = _replaced(data, error, name, path)
        message = f"`{name}` is not UTF-8: line {place.file.location(place.start)[0]} has the byte 0x{data[error.start]:02x}"
        labels = () if blame is None else (Label(blame, "imported here"),)
        sink.report(codes.ENCODING, place, message, "save the file as UTF-8", labels)
        return None
    return normalized(SourceFile(name, text, path), sink)


def _replaced(data: bytes, error: UnicodeDecodeError, name: str, path: Path | None) -> Span:
    """Return the span of the first byte that is not UTF-8, in a text with `U+FFFD` in place of each."""
    before = data[: error.start].decode("utf-8-sig", "replace")
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    at = len(before.replace("\r\n", "\n"))
    return SourceFile(name, text, path).span(at, at + 1)


def normalized(source: SourceFile, sink: Sink) -> SourceFile | None:
    """Return the source with `\\n` line ends and no byte order mark; None after a report of a NUL or a file too large for a policy."""
    text = source.text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        at = text.index("\0")
        message = "the file contains a NUL character, so it is not text"
        sink.report(codes.ENCODING, SourceFile(source.name, text, source.path).span(at, at + 1), message)
        return None
    if len(text) > MAX_BYTES:
        _too_large(SourceFile(source.name, "", source.path).span(0, 0), source.name, sink)
        return None
    return source if text == source.text else SourceFile(source.name, text, source.path)


def _too_large(place: Span, name: str, sink: Sink) -> None:
    message = f"`{name}` is larger than {MAX_BYTES // 1024} KiB"
    sink.report(codes.TOO_LARGE, place, message, help="a policy is a dozen lines: is this the right file?")
