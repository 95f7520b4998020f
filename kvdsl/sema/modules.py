"""Files and what they import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.resources import resource
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.reader import read
from kvdsl.syntax.shape import parse_module

EDITION = 1
MAX_IMPORTS = 16


@dataclass(eq=False)
class Module:
    """A file with the modules that it imports."""

    syntax: syn.Module
    imports: list[Module] = field(default_factory=list)

    @property
    def file(self) -> SourceFile:
        """The file."""
        return self.syntax.file

    @property
    def broken(self) -> bool:
        """Whether so much of it could not be read that names may be missing."""
        return self.syntax.broken or any(imported.broken for imported in self.imports)

    def lets(self) -> Iterator[tuple[syn.Let, Module]]:
        """Its own lets, then those of the files that it imports; each with the file in which its names mean something."""
        for module in (self, *self.imports):
            for let in module.syntax.lets:
                yield let, module

    def policies(self) -> Iterator[tuple[syn.Policy, Module]]:
        """Its own policies, then those of the files that it imports."""
        for module in (self, *self.imports):
            for policy in module.syntax.policies:
                yield policy, module


class Loader:
    """Loads files, each once."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._loaded: dict[Path, Module] = {}
        self._loading: list[Path] = []

    def load(self, source: SourceFile) -> Module:
        """A source with everything that it imports."""
        syntax = parse_module(source, self.sink)
        self._check_editions(syntax)
        module = Module(syntax)
        identity = None if source.path is None else source.path.resolve()
        if identity is not None:
            self._loaded[identity] = module
            self._loading.append(identity)
        for statement in syntax.imports:
            imported = self._import(statement, source)
            if imported is None:
                module.syntax = replace(syntax, broken=True)
            elif imported not in module.imports:
                module.imports.append(imported)
        if identity is not None:
            self._loading.pop()
        return module

    def _check_editions(self, module: syn.Module) -> None:
        start = module.file.span(0, 0)
        if not module.editions:
            if not module.broken:
                help = f"write `kv {EDITION}` on the first line"
                self.sink.report(codes.EDITION_MISSING, start, "the file does not say its edition", help)
            return
        first, *more = module.editions
        others = [item.span for items in (module.imports, module.lets, module.policies, module.tests) for item in items]
        if any(other.start < first.span.start for other in others):
            self.sink.report(codes.EDITION, first.span, "the edition does not stand first")
        for edition in more:
            message = "the edition is given twice"
            self.sink.report(codes.EDITION, edition.span, message, labels=[Label(first.span, "first here")])
        for edition in module.editions:
            if edition.text != str(EDITION):
                message = f"unknown edition `{edition.text}`"
                self.sink.report(codes.EDITION, edition.span, message, f"this kvdsl knows `kv {EDITION}`")

    def _import(self, statement: syn.Import, importer: SourceFile) -> Module | None:
        name, span = statement.path.text, statement.path.span
        if not name.endswith(".kv") or name.startswith(("/", "\\")) or not name.isprintable() or ":" in name:
            help = 'for example `import "h2o.kv"`'
            self.sink.report(codes.IMPORT, span, "an import names a .kv file by a relative path", help)
            return None
        path, shown = _find(name, importer)
        try:
            identity = path.resolve()
        except (OSError, RuntimeError):
            identity = path
        if len(self._loading) > MAX_IMPORTS:
            self.sink.report(codes.IMPORT, span, f"imports are nested more than {MAX_IMPORTS} deep")
            return None
        if identity in self._loading:
            self.sink.report(codes.CYCLE, span, f"`{name}` imports this file, directly or through others")
            return None
        if identity in self._loaded:
            return self._loaded[identity]
        source = read(path, self.sink, shown, blame=span)
        return None if source is None else self.load(source)


def _find(name: str, importer: SourceFile) -> tuple[Path, str]:
    """Where an import lies, and how to call it: beside the importing file, or else among the shipped policies."""
    folder = Path() if importer.path is None else importer.path.parent
    beside = folder / name, str(Path(importer.name).parent / name)
    try:
        if beside[0].exists():
            return beside
    except OSError:
        return beside
    shipped = resource("policies") / Path(name).name
    return (shipped, str(shipped)) if "/" not in name and shipped.exists() else beside
