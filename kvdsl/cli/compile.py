"""`kvdsl compile`: compile policies to Python packages."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from kvdsl.cli import completion
from kvdsl.cli.common import CLEAN, FINDINGS, finish, json_option, kv_files, print_json, report, set_option, warning
from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input
from kvdsl.ir.nodes import Number, Policy
from kvdsl.ir.printer import print_expression
from kvdsl.shipped import file_of, policy_name, shipped_as, text_of
from kvdsl.source import Combined, SourceFile


@dataclass(frozen=True)
class Compiled:
    """A policy and the files of its package, by path below the output folder.

    Attributes:
        name: its name on the command line.
        origin: its source, for the manifest.
        changed: the files that differ from those in the folder.
        stale: files of an earlier compilation that the package no longer has.
    """

    name: str
    origin: str
    policy: Policy
    files: dict[str, str | bytes]
    changed: tuple[str, ...]
    stale: tuple[str, ...]


@click.command()
@click.argument("policies", metavar="FILE...", nargs=-1, required=True, shell_complete=completion.policies)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True,
              help="The folder for the packages.")  # fmt: skip
@set_option
@click.option("--check", is_flag=True, help="Write nothing; if files would change, show the difference and exit with 1.")
@click.option("--force", is_flag=True, help="Overwrite a package from another source, and files that kvdsl did not make.")
@click.option("--emit", type=click.Choice(["syntax", "ir", "plan", "code"]),
              help="Print one stage of the compiler and write nothing: the file's tree, the flat policy, the templates' "
                   "input, or the files; with --json the policy as data.")  # fmt: skip
@json_option
def command(
    policies: tuple[str, ...], out: Path, settings: dict[str, str], check: bool, force: bool, emit: str | None, as_json: bool
) -> None:
    """Compile policies to Python packages.

    FILE is a .kv file, a folder of them, `-` for standard input, a shipped policy by its name (see `kvdsl list`), or `mine.py:calm` for
    a policy written in Python, whose file is executed, so name only trusted ones. `roco.kv` becomes the package `generated/roco` with
    the class `RoCoCache`. Unchanged files are not touched. A package from another source is overwritten with --force only.

    \b
    Examples:
      kvdsl compile roco                         a shipped policy
      kvdsl compile mine.kv --out caches         a policy of your own
      kvdsl compile h2o --set budget=1024        with another default
      kvdsl compile --check roco h2o             for CI: are the committed files up to date?
      kvdsl compile roco --emit ir               a stage of the compiler: syntax, ir, plan or code
    """
    policies = tuple(_policies_of(policies))
    analysed = [_analyse(name, settings) for name in policies]
    if emit is not None:
        if as_json:
            print_json({"policies": [_stage_as_data(policy, text_of(found), emit) for policy, found in analysed]})
        else:
            for policy, found in analysed:
                click.echo(_stage(policy, text_of(found), emit), nl=False)
        return
    compiled = [_compile(name, policy, found, out) for name, (policy, found) in zip(policies, analysed, strict=True)]
    _refuse_same_names(compiled)
    if not check:
        if not force:
            _refuse_others(compiled, out)
        _write(compiled, out)
    if as_json:
        print_json({"policies": [_as_data(one, out) for one in compiled]})
    else:
        _show(compiled, out, settings, check)
    finish(FINDINGS if check and any(one.changed or one.stale for one in compiled) else CLEAN)


def _policies_of(names: Iterable[str]) -> Iterator[str]:
    """Yield the names, with folders replaced by the files of policies in them."""
    for name in names:
        if not Path(name).is_dir():
            yield name
            continue
        found = [one for one in kv_files([name]) if policy_name(text_of(Path(one))) is not None]
        if not found:
            raise KvdslError(f"no .kv file below `{name}` holds a policy")
        yield from found


def _analyse(name: str, settings: Mapping[str, str]) -> tuple[Policy, Path | SourceFile]:
    """Return the checked policy and its source; print warnings, and end the command after errors."""
    from kvdsl.compiler import analyse, find_policy

    found = find_policy(name)
    analysis = analyse(found, settings=settings)
    policy = analysis.policy
    report(analysis.diagnostics)
    return policy, found


def _compile(name: str, policy: Policy, found: Path | SourceFile, out: Path) -> Compiled:
    from kvdsl.compiler import package
    from kvdsl.emit import data_of, differing, stale

    data, origin = data_of(policy), _origin(name, found, out)
    made: dict[str, str | bytes] = {**package(policy, text_of(found), data, origin), **data}
    files = {f"{policy.stem}/{name}": content for name, content in made.items()}
    old = tuple(f"{policy.stem}/{name}" for name in stale(made, out / policy.stem))
    if not (out / "__init__.py").exists():
        files = {"__init__.py": '"""KV-cache policies, compiled by kvdsl."""\n', **files}
    return Compiled(name, origin, policy, files, tuple(differing(files, out)), old)


def _origin(name: str, found: Path | SourceFile, out: Path) -> str:
    """Return a policy's source for the manifest: a shipped one by name, a file by its path relative to the output folder's parent."""
    while isinstance(found, Combined):
        name, found = found.text[: found.named], found.base
    if is_standard_input(name):
        return name
    file = found if isinstance(found, Path) else file_of(name)
    if (shipped := shipped_as(file)) is not None:
        return shipped
    path = Path(os.path.relpath(file, out.parent)).as_posix()
    return path if isinstance(found, Path) else f"{path}:{found.stem}"


def _refuse_same_names(compiled: list[Compiled]) -> None:
    stems = [one.policy.stem for one in compiled]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise click.UsageError(f"several of the files would become the package `{twice[0]}`")


def _refuse_others(compiled: list[Compiled], out: Path) -> None:
    """Refuse to overwrite packages from other sources, before writing anything."""
    from kvdsl.emit import is_ours, origin_of

    for one in compiled:
        folder = out / one.policy.stem
        there = origin_of(folder)
        if there is None and all(is_ours(out / name) for name in one.changed if Path(name).parent.name):
            continue
        if there != one.origin:
            what = "was not made by kvdsl" if there is None else f"was made from `{there}`"
            raise KvdslError(
                f"`{folder.as_posix()}` {what}, and `{one.origin}` would overwrite it; give the file another name, `--out` another "
                "folder, or overwrite it with `--force`"
            )


def _write(compiled: list[Compiled], out: Path) -> None:
    from kvdsl.emit import write

    for one in compiled:
        (out / one.policy.stem).mkdir(parents=True, exist_ok=True)
        write({name: one.files[name] for name in one.changed}, out)
        for name in one.stale:
            (out / name).unlink(missing_ok=True)


def _as_data(one: Compiled, out: Path) -> dict[str, object]:
    def below(names: Iterable[str]) -> list[str]:
        return [(out / name).as_posix() for name in names]

    return {"name": one.policy.name, "files": below(one.files), "changed": below(one.changed), "removed": below(one.stale)}


# -- for people --------------------------------------------------------------------------------------------------------


def _show(compiled: list[Compiled], out: Path, settings: Mapping[str, str], check: bool) -> None:
    from kvdsl.lower.without import without

    for one in compiled:
        for name in one.files:
            state = ("would change" if check else "written") if name in one.changed else "unchanged"
            click.echo(f"{state:<12} {(out / name).as_posix()}")
        for name in one.stale:
            click.echo(f"{'would remove' if check else 'removed':<12} {(out / name).as_posix()}")
    if check:
        for one in compiled:
            for name in one.changed:
                click.echo("".join(_difference(out, name, one.files[name])), nl=False)
        if any(one.changed or one.stale for one in compiled):
            again = ["kvdsl", "compile", *(one.name for one in compiled if one.changed or one.stale)]
            again += [] if out == Path("generated") else ["--out", str(out)]
            again += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
            click.echo(f"not up to date: run `{shlex.join(again)}`", err=True)
        return
    for one in compiled:
        if (reason := without(one.files[f"{one.policy.stem}/manifest.json"], "cpu")) is not None:
            warning(f"`{one.policy.stem}` runs on the torch backend: {reason}")
    if len(compiled) == 1:
        click.echo(f"\n{_usage(compiled[0].policy, out)}")


def _difference(out: Path, name: str, text: str | bytes) -> Iterator[str]:
    path = out / name
    if isinstance(text, bytes):
        return iter([f"{path.as_posix()} is another file\n"])
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        text.splitlines(keepends=True),
        f"{path.as_posix()} (there)",
        f"{path.as_posix()} (new)",
    )
    return (line if line.endswith("\n") else f"{line}\n" for line in lines)


def _usage(policy: Policy, out: Path) -> str:
    """Return example code that imports the class, as a package if the folder's path is one."""
    stem, name = policy.stem, f"{policy.name}Cache"
    parts = out.parts
    if not out.is_absolute() and all(part.isidentifier() for part in parts):
        module = ".".join((*parts, stem))
        lines = [f"from {module} import {name}"]
    else:
        lines = [f"from {stem} import {name}          # with {out} on the import path"]
    defaults = {param.name: param.default for param in policy.params}
    budget = f", budget={print_expression(defaults['budget'])}" if isinstance(defaults.get("budget"), Number) else ""
    given = "".join(f", {one.name}=f" for one in policy.given if one.default is None)
    lines.append(f"out = model.generate(**inputs, cache={name}(model{budget}{given}))")
    if given:
        lines.append("# f(module, hidden_states) returns a number per new token: [batch, KV heads or 1, tokens]")
    return "\n".join(lines)


# -- stages ------------------------------------------------------------------------------------------------------------


def _stage(policy: Policy, source: str, stage: str) -> str:
    if stage == "syntax":
        return _tree(policy, source)
    if stage == "ir":
        from kvdsl.ir.printer import print_policy

        return print_policy(policy)
    if stage == "plan":
        import pprint

        from kvdsl.compiler import plan_of

        return pprint.pformat(plan_of(policy), width=120) + "\n"
    from kvdsl.compiler import package

    files = package(policy, source)
    return "".join(f"# {'-' * 20} {policy.stem}/{name}\n{text}\n" for name, text in files.items())


def _stage_as_data(policy: Policy, source: str, stage: str) -> dict[str, object]:
    """Return the IR and the files as data, and the other stages as text."""
    if stage == "ir":
        return {"name": policy.name, "ir": policy.model_dump(mode="json")}
    if stage == "code":
        from kvdsl.compiler import package

        return {"name": policy.name, "code": package(policy, source)}
    return {"name": policy.name, stage: _stage(policy, source, stage)}


def _tree(policy: Policy, source: str) -> str:
    """Print the syntax tree of the file, one node a line."""
    from kvdsl.diagnostics import Sink
    from kvdsl.source import SourceFile
    from kvdsl.syntax.parser import parse

    tree = parse(SourceFile(f"{policy.stem}.kv", source), Sink()).tree
    assert tree is not None, "the file was checked"
    return tree.pretty()
