"""Load files and their imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink, did_you_mean, nearest
from kvdsl.helps import Help, add, begin, both, instead, named_and_imported, offer
from kvdsl.sema.editions import check_edition
from kvdsl.shipped import all_policies, is_shipped_like_a_file, shipped_policy, stems_by_name
from kvdsl.source import Combined, SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.reader import normalized, read
from kvdsl.syntax.shape import parse_module

EDITION = 2
"""The newest edition of the language."""
MAX_IMPORTS = 16

NO_TEXTS: Mapping[Path, str] = MappingProxyType({})

Found = tuple[Path, str, str | None]
"""An imported file's path, its name in messages, and a help if it cannot be read."""


@dataclass(eq=False)
class Module:
    """A file with its imported modules, each with the statement that names it."""

    syntax: syn.Module
    imported: list[tuple[syn.Import, Module]] = field(default_factory=list)

    @property
    def imports(self) -> list[Module]:
        """The imported modules, each once."""
        return list(dict.fromkeys(module for _, module in self.imported))

    @property
    def file(self) -> SourceFile:
        return self.syntax.file

    @property
    def edition(self) -> int:
        """The file's edition of the language; the newest if the file does not state one."""
        said = [one.text for one in self.syntax.editions]
        return int(said[0]) if said and said[0].isdecimal() else EDITION

    @property
    def broken(self) -> bool:
        """Whether unreadable text may hide definitions, here or in an import."""
        return any(module.syntax.broken for module in self.all())

    def all(self) -> Iterator[Module]:
        """Yield the module and its direct and indirect imports, each once."""
        waiting, seen = [self], set[Module]()
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                yield module
                waiting += module.imports

    def lets(self) -> Iterator[tuple[syn.Let, Module]]:
        """Yield the module's lets, then those of its imports, each with the module that resolves its names."""
        for module in (self, *self.imports):
            for let in module.syntax.lets:
                yield let, module

    def policies(self) -> Iterator[tuple[syn.Policy, Module]]:
        """Yield the module's policies, then those of its imports."""
        for module in (self, *self.imports):
            for policy in module.syntax.policies:
                yield policy, module


class Loader:
    """Loads files, each once.

    Args:
        texts: texts to read instead of files, by resolved path, such as an editor's unsaved buffers.
    """

    def __init__(self, sink: Sink, texts: Mapping[Path, str] = NO_TEXTS) -> None:
        self.sink, self.texts = sink, texts
        self._loaded: dict[Path, Module] = {}
        self._tried: set[Path] = set()
        self._loading: list[Path] = []

    @property
    def read(self) -> list[Path]:
        """The resolved paths of all loaded files, and of imports that are missing or unreadable."""
        return [*self._loaded, *sorted(self._tried - self._loaded.keys())]

    def load(self, source: SourceFile) -> Module:
        """Load a source with all its imports."""
        if isinstance(source, Combined):
            return self._combined(source)
        syntax = parse_module(source, self.sink)
        self._check_editions(syntax)
        module = Module(syntax)
        check_edition(syntax, module.edition, self.sink)
        identity = None if source.path is None else source.path.resolve()
        if identity is not None:
            self._loaded[identity] = module
            self._loading.append(identity)
        for statement in syntax.imports:
            imported = self._import(statement, source)
            if imported is None:
                module.syntax = replace(syntax, broken=True)
            else:
                module.imported.append((statement, imported))
        if identity is not None:
            self._loading.pop()
        return module

    def _combined(self, source: Combined) -> Module:
        """Load a policy with clauses as a file that imports the policy, in that file's edition."""
        named = source.span(0, source.named)
        text = source.base if isinstance(source.base, SourceFile) else read(source.base, self.sink, str(source.base), named)
        base = None if text is None else self.load(text)
        syntax = parse_module(source, self.sink)
        if base is None:
            return Module(replace(syntax, broken=True))
        if not base.broken and not base.syntax.policies:
            self.sink.report(codes.ONE_POLICY, named, f"there is no policy in `{named.text}`", "name a file that holds one")
            syntax = replace(syntax, broken=True)
        statement = syn.Import(named, syn.Word(named, base.file.stem), False)
        return Module(replace(syntax, editions=base.syntax.editions), [(statement, base)])

    def _check_editions(self, module: syn.Module) -> None:
        start = module.file.span(0, 0)
        if not module.editions:
            if not module.broken:
                help = begin(f"write `kv {EDITION}` on the first line", f"kv {EDITION}")
                self.sink.report(codes.EDITION_MISSING, start, "the file does not state its edition", help)
            return
        first, *more = module.editions
        others = [item.span for items in (module.imports, module.lets, module.policies, module.tests) for item in items]
        if any(other.start < first.span.start for other in others):
            self.sink.report(codes.EDITION, first.span, "the edition must come first")
        for edition in more:
            message = "the edition is given twice"
            self.sink.report(codes.EDITION, edition.span, message, labels=[Label(first.span, "first here")])
        for edition in module.editions:
            if edition.text not in map(str, range(1, EDITION + 1)):
                message = f"unknown edition `{edition.text}`"
                self.sink.report(
                    codes.EDITION, edition.span, message, offer(f"the newest edition of this kvdsl is `kv {EDITION}`")
                )

    def _import(self, statement: syn.Import, importer: SourceFile) -> Module | None:
        found = self._shipped(statement) if statement.shipped else self._beside(statement, importer)
        return None if found is None else self._enter(statement, *found)

    def _shipped(self, statement: syn.Import) -> Found | None:
        """Find the shipped policy that an import names."""
        stem = statement.name.text
        path = shipped_policy(stem)
        if path is None:
            help = did_you_mean(stem, (path.stem for path in all_policies()))
            help = help or f'`kvdsl list` shows them; a file is named in quotes: `import "{stem}.kv"`'
            self.sink.report(codes.IMPORT, statement.name.span, f"there is no shipped policy `{stem}`", help)
            return None
        return path, str(path), None

    def _beside(self, statement: syn.Import, importer: SourceFile) -> Found | None:
        """Find the file that an import names by a path relative to the importing file.

        A path without a folder may also name a policy of the short list, which was once the only way to import it. A warning says which
        of the two is used.
        """
        name, span = statement.name.text, statement.name.span
        stem = PurePosixPath(name).stem
        shipped = shipped_policy(stem)
        new = f"`import {stem}` is the shipped policy"
        if not name.endswith(".kv") or name.startswith(("/", "\\")) or not name.isprintable() or ":" in name:
            help = (
                f'{new}, `import "{stem}.kv"` a file'
                if shipped
                else 'for example `import "mine.kv"`; `import h2o` is a shipped policy'
            )
            self.sink.report(codes.IMPORT, span, "an import names a .kv file by a relative path", help)
            return None
        folder = Path() if importer.path is None else importer.path.parent
        path, shown = folder / name, str(Path(importer.name).parent / name)
        self._tried.add(_resolved(path))
        if shipped is None or not is_shipped_like_a_file(shipped) or "/" in name:
            return path, shown, None if shipped is None else new
        if not _exists(path):
            message = f"there is no file `{shown}`, so the shipped policy of that name is imported"
            self.sink.report(codes.SHIPPED_BY_FILE, span, message, instead(f"write `import {stem}`", stem))
            return shipped, str(shipped), None
        if not _same(path, shipped) and importer.stem != f"{stem}_test":
            message = f"`{name}` is the file beside this one, not the shipped policy of that name"
            help = both(
                instead(f'write `import "./{name}"` to make that clear', f'"./{name}"'),
                instead(f", or `import {stem}` for the shipped policy", stem),
            )
            self.sink.report(codes.SHIPPED_BY_FILE, span, message, help)
        return path, shown, None

    def _enter(self, statement: syn.Import, path: Path, shown: str, help: str | None) -> Module | None:
        """Load an imported file; None after a report that it is unreadable or part of a cycle."""
        name, span = statement.name.text, statement.name.span
        identity = _resolved(path)
        if len(self._loading) > MAX_IMPORTS:
            self.sink.report(codes.IMPORT, span, f"imports are nested more than {MAX_IMPORTS} deep")
            return None
        if identity in self._loading:
            self.sink.report(codes.CYCLE, span, f"`{name}` imports this file, directly or through others")
            return None
        if identity in self._loaded:
            return self._loaded[identity]
        text = self.texts.get(identity)
        source = (
            read(path, self.sink, shown, blame=span, help=help)
            if text is None
            else normalized(SourceFile(shown, text, path), self.sink)
        )
        return None if source is None else self.load(source)


def import_of(policy: str) -> str:
    """Return a help that imports an unknown policy, from the shipped file that holds it if there is one."""
    stems = stems_by_name()
    stem = stems.get(policy)
    if stem is not None:
        return add(f"write `import {stem}`", " above")
    near = nearest(policy, stems)
    if near is not None:
        text = f"did you mean `{near}`, from `import {stems[near]}`?"
        return Help(text, lambda span: named_and_imported(span, near, stems[near]))
    return 'import the file that defines it: `import h2o`, a shipped policy, or `import "mine.kv"`, a file'


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _exists(path: Path) -> bool:
    """Return whether a path exists; True if the system denies access."""
    try:
        return path.exists()
    except OSError:
        return True


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False
