"""Names, imports, inheritance."""

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir.printer import print_expression, print_keep
from kvdsl.source import SourceFile
from tests.diagnostics.expect import body, check, expect, expect_in, only


def extending(*statements: str, parent: str = "H2O", module: str = "h2o") -> str:
    """A policy that extends a shipped one."""
    return "\n".join(["kv 1", f"import {module}", f"policy P extends {parent} {{", '  "A test."', *statements, "}", ""])


def write(folder: Path, **files: str) -> Path:
    for stem, text in files.items():
        (folder / f"{stem}.kv").write_text(text)
    return folder / "main.kv"


# -- inheritance -------------------------------------------------------------------------------------------------------


def test_a_policy_inherits_everything() -> None:
    policy = check(extending()).policy
    assert (policy.name, policy.stem, policy.doc) == ("P", "example", "A test.")
    assert [param.name for param in policy.params] == ["budget", "recent"]


def test_an_inherited_param_that_nothing_reads_any_more_is_none() -> None:
    dropped = extending("override keep")
    assert [param.name for param in check(dropped).policy.params] == ["budget"]
    assert not check(dropped).diagnostics
    found = only(dropped, "KV0215", recent="3")
    assert (found.message, found.help) == (
        "nothing reads the inherited param `recent` any more",
        "`P` overrides what read it",
    )
    kept = extending("override keep", "param mine = recent + 1", "keep first mine")
    assert [param.name for param in check(kept).policy.params] == ["budget", "recent", "mine"]


def test_the_parents_budget_can_be_read_in_an_override() -> None:
    policy = check(extending("override budget max(budget - layer, 8)")).policy
    assert policy.budget is not None
    assert print_expression(policy.budget) == "max(budget - layer, 8)"


BOTH = ("override param budget = 64", "override budget budget * 2")


@pytest.mark.parametrize("lines", [BOTH, BOTH[::-1]], ids=["param first", "statement first"])
def test_the_param_and_the_statement_may_change_together(lines: tuple[str, ...]) -> None:
    policy = check(extending(*lines)).policy
    assert print_expression(policy.params[0].default) == "64"
    assert policy.budget is not None and print_expression(policy.budget) == "budget * 2"


def test_a_parents_let_reads_what_the_child_overrides(tmp_path: Path) -> None:
    base = body("param budget = 8", "let weight = 2", "let scaled(x) = x * weight", "score scaled(age)")
    child = 'kv 1\nimport "base.kv"\npolicy Q extends P { "d"; override let weight = 3 }'
    policy = analyse(write(tmp_path, base=base, main=child)).policy
    assert policy.score is not None
    assert print_expression(policy.score) == "age * 3"


def test_names_mean_what_they_mean_in_the_file_that_uses_them(tmp_path: Path) -> None:
    base = "kv 1\nlet weight = 2\n" + body("param budget = 8", "score age * weight").removeprefix("kv 1\n")
    child = 'kv 1\nimport "base.kv"\nlet another = 5\npolicy Q extends P { "d"; override score position * another * weight }'
    policy = analyse(write(tmp_path, base=base, main=child)).policy
    assert policy.score is not None
    assert print_expression(policy.score) == "position * 5 * 2"
    child = 'kv 1\nimport "base.kv"\npolicy Q extends P { "d"; let weight = 7; override budget weight }'
    policy = analyse(write(tmp_path, base=base, main=child)).policy
    assert policy.budget is not None
    assert print_expression(policy.budget) == "7"


@pytest.mark.parametrize(
    ("statement", "what", "help"),
    [
        ("score position", "`score`", "write `override score ...`"),
        ("param budget = 64", "`budget`", "write `override param ...`"),
        ("budget 64", "`budget`", "write `override budget ...`"),
    ],
)
def test_changes_need_override(statement: str, what: str, help: str) -> None:
    found = only(extending(statement), "KV0208")
    assert (found.message, found.span.text, found.help) == (
        f"{what} is inherited, so changing it needs `override`",
        statement,
        help,
    )
    assert found.labels[0].text == "inherited from here"


def test_override_needs_something_to_change() -> None:
    found = only(extending("override slack 3"), "KV0209")
    assert (found.message, found.help) == ("`H2O` has no `slack` to override", "leave out `override`")
    found = only(extending("override param recnt = 3"), "KV0209")
    assert (found.message, found.help) == ("`H2O` has no `recnt` to override", "did you mean `recent`?")
    found = only(extending("override keep", parent="Full", module="full"), "KV0209")
    assert found.message == "`Full` has no `keep` to override"
    message = "`score` overrides nothing: `P` extends no policy"
    expect(body("param budget = 8", "override score age"), "KV0209", message, "score age", "leave out `override`")


def test_a_new_statement_needs_no_override() -> None:
    assert check(extending("slack 3", "max_drop 8")).ok


def test_unknown_parents() -> None:
    expect(extending(parent="H20"), "KV0203", "unknown policy `H20`", "H20", "did you mean `H2O`?")


def test_a_policy_cannot_extend_itself() -> None:
    assert only('kv 1\npolicy P extends P { "d" }', "KV0205").message == "`P` extends itself"


# -- definitions -------------------------------------------------------------------------------------------------------


def test_a_let_is_not_offered_itself() -> None:
    found = only(body("param budget = 8", "let z = zz", "score age + z"), "KV0201")
    assert found.help == "add `param zz = 1`, `let zz = ...`, or `given zz`, a number of each token, if it is yours"
    help = "did you mean `zz`?"
    assert only(body("param budget = 8", "let zz = 1", "let z = zzz", "score age + z + zz"), "KV0201").help == help


def test_a_let_that_an_import_has_too_is_shown_where_it_was_written(tmp_path: Path) -> None:
    own = 'kv 1\nimport "lib.kv"\nlet recent = 4\npolicy P { "d"; param budget = 8; score age; keep last recent }'
    (found,) = analyse(write(tmp_path, lib="kv 1\nlet recent = 8\n", main=own)).diagnostics
    assert (found.code, found.file, found.span.text) == ("KV0206", str(tmp_path / "main.kv"), "recent")
    assert [(label.span.file.name, label.text) for label in found.labels] == [
        (str(tmp_path / "lib.kv"), "imported from here")
    ]


def test_duplicates_name_both_places() -> None:
    found = only(body("param budget = 8", "let budget2 = 1", "let budget2 = 2", "score age"), "KV0206")
    assert (found.message, found.span.text) == ("`budget2` is defined twice", "let budget2 = 2")
    assert [(label.span.text, label.text) for label in found.labels] == [("let budget2 = 1", "first here")]
    found = only(body("param budget = 8", "score age", "score position"), "KV0207")
    assert (found.message, found.span.text) == ("`score` is given twice", "score position")
    assert [(label.span.text, label.text) for label in found.labels] == [("score age", "first here")]


def test_params_and_lets_share_their_names() -> None:
    assert only(body("param budget = 8", "param a = 1", "let a = 2", "score age"), "KV0206")


@pytest.mark.parametrize("statement", ["let f(x, x) = x", "let f(a, b, a) = a"])
def test_arguments_have_different_names(statement: str) -> None:
    assert only(body("param budget = 8", statement, "score age"), "KV0206").message.endswith("is named twice")


@pytest.mark.parametrize("name", ["mean", "count", "random", "where", "project", "fold"])
def test_functions_cannot_be_redefined(name: str) -> None:
    message, help = f"`{name}` is a built-in function and cannot be redefined", f"choose another name, `my_{name}`, say"
    expect_in(f"let {name}(x) = x", "KV0210", message, name, help)


@pytest.mark.parametrize(
    "name",
    ["class", "None", "while", "lambda", "int", "template", "namespace", "model", "self", "backend", "seed", "a__b", "_A"],
)
def test_names_that_generated_code_cannot_have(name: str) -> None:
    found = only(body("param budget = 8", f"param {name} = 3", "score age"), "KV0111")
    assert (found.span.text, found.help) == (name, "choose another name")


def test_long_names() -> None:
    assert only(body("param budget = 8", f"param {'a' * 65} = 3", "score age"), "KV0111")
    assert [found.code for found in check(body("param budget = 8", f"param {'a' * 64} = 3", "score age")).diagnostics] == [
        "KV0212"
    ]


@pytest.mark.parametrize("name", ["my-policy.kv", "class.kv", "2nd.kv", "größe.kv", "a__b.kv"])
def test_a_files_stem_is_a_package(name: str) -> None:
    (found,) = analyse(SourceFile(name, 'kv 1\npolicy P { "d" }', Path(name))).diagnostics
    assert (found.code, found.help) == ("KV0111", "rename the file: its stem consists of letters, digits and `_`")


def test_lets_and_their_arguments_may_have_any_name() -> None:
    """They are put in: no generated code has them."""
    lets = ("let lambda(class, is = 2) = class * is", "let double = lambda(age)")
    assert not check(body("param budget = 8", *lets, "score lambda(double, is = 3)")).diagnostics


def test_unused_names_are_warned_of() -> None:
    analysis = check(body("param budget = 8", "param sinks = 3", "let a = sinks", "let f(x) = x", "score age"))
    assert [(found.code, found.severity, found.message) for found in analysis.diagnostics] == [
        ("KV0212", "warning", "`sinks` is never used"),
        ("KV0212", "warning", "`a` is never used"),
        ("KV0212", "warning", "`f` is never used"),
    ]
    assert analysis.ok


def test_a_missing_docstring_is_warned_of() -> None:
    found = only("kv 1\npolicy P {}", "KV0213")
    assert (found.severity, found.message, found.span.text) == ("warning", "`P` has no docstring", "P")


# -- files and imports -------------------------------------------------------------------------------------------------


def test_a_file_holds_one_policy() -> None:
    found = only('kv 1\npolicy A { "d" }\npolicy B { "d" }', "KV0211")
    assert (found.message, found.span.text) == ("a file holds one policy", "B")


def test_a_library_holds_lets() -> None:
    analysis = check("kv 1\nlet f(x) = x + 1\nlet a = f(age)\n")
    assert (analysis.ok, analysis.policies, analysis.diagnostics) == (True, (), ())
    assert only("kv 1\nlet f(x) = x + atn\n", "KV0201")
    assert only("kv 1\nlet a = mean(age)\n", "KV0304")


def test_lets_are_imported(tmp_path: Path) -> None:
    main = 'kv 1\nimport "lib.kv"\n' + body("param budget = 8", "score f(age)").removeprefix("kv 1\n")
    policy = analyse(write(tmp_path, lib="kv 1\nlet one = 1\nlet f(x) = x + one\n", main=main)).policy
    assert policy.score is not None
    assert print_expression(policy.score) == "age + 1"


def test_imports_are_not_passed_on(tmp_path: Path) -> None:
    main = 'kv 1\nimport "b.kv"\n' + body("param budget = 8", "score f(age)").removeprefix("kv 1\n")
    files = {"a": "kv 1\nlet f(x) = x\n", "b": 'kv 1\nimport "a.kv"\nlet g(x) = f(x)\n', "main": main}
    assert [found.code for found in analyse(write(tmp_path, **files)).diagnostics] == ["KV0202"]


def test_two_imports_cannot_define_the_same_name(tmp_path: Path) -> None:
    main = 'kv 1\nimport "a.kv"\nimport "b.kv"\n' + body("param budget = 8", "score f(age)").removeprefix("kv 1\n")
    files = {"a": "kv 1\nlet f(x) = x\n", "b": "kv 1\nlet f(x) = x\n", "main": main}
    assert [found.code for found in analyse(write(tmp_path, **files)).diagnostics] == ["KV0206"]


def test_imports_cannot_go_in_circles(tmp_path: Path) -> None:
    files = {"main": 'kv 1\nimport "b.kv"\npolicy P { "d" }\n', "b": 'kv 1\nimport "main.kv"\nlet a = 1\n'}
    (found,) = analyse(write(tmp_path, **files)).diagnostics
    assert (found.code, found.file) == ("KV0205", str(tmp_path / "b.kv"))
    (found,) = analyse(write(tmp_path, main='kv 1\nimport "main.kv"\npolicy P { "d" }\n')).diagnostics
    assert found.code == "KV0205"


def test_long_chains_of_imports_are_refused(tmp_path: Path) -> None:
    files = {f"a{i}": f'kv 1\nimport "a{i + 1}.kv"\nlet x{i} = 1\n' for i in range(300)}
    files["main"] = 'kv 1\nimport "a0.kv"\npolicy P { "d" }\n'
    assert {found.code for found in analyse(write(tmp_path, **files)).diagnostics} == {"KV0204"}


OWN = 'kv 1\npolicy H2O { "Mine."; param budget = 3; score age }\n'


def test_shipped_policies_are_imported_by_their_names_from_anywhere(tmp_path: Path) -> None:
    assert not analyse(SourceFile("-", extending())).diagnostics
    analysis = analyse(write(tmp_path, main=extending(), h2o=OWN))  # a file of that name changes nothing
    assert not analysis.diagnostics
    assert [param.name for param in analysis.policy.params] == ["budget", "recent"]


def test_a_file_may_bear_a_shipped_policys_name_and_extend_it(tmp_path: Path) -> None:
    text = extending("override budget 7", module="roco", parent="RoCo")
    write(tmp_path, roco=text)
    assert not analyse(tmp_path / "roco.kv").diagnostics
    write(tmp_path, roco=text.replace("policy P", "policy RoCo"))
    (found,) = analyse(tmp_path / "roco.kv").diagnostics
    assert (found.message, found.help) == ("`RoCo` extends itself", "give one of the two another name")


def test_a_shipped_policy_imported_as_a_file_is_warned_of(tmp_path: Path) -> None:
    old = extending(module='"h2o.kv"')
    analysis = analyse(write(tmp_path, main=old))
    (found,) = analysis.diagnostics
    assert (found.code, found.severity, found.span.text, found.help) == (
        "KV0217",
        "warning",
        '"h2o.kv"',
        "write `import h2o`",
    )
    assert found.message == f"there is no file `{tmp_path / 'h2o.kv'}`, so the shipped policy of that name is imported"
    assert [param.name for param in analysis.policy.params] == ["budget", "recent"]
    (found,) = analyse(SourceFile("-", old)).diagnostics
    assert found.message == "there is no file `h2o.kv`, so the shipped policy of that name is imported"


def test_a_file_with_the_name_of_a_shipped_policy_is_warned_of(tmp_path: Path) -> None:
    analysis = analyse(write(tmp_path, main=extending(module='"h2o.kv"'), h2o=OWN))
    (found,) = analysis.diagnostics
    assert found.message == "`h2o.kv` is the file beside this one, not the shipped policy of that name"
    assert found.help == 'write `import "./h2o.kv"` to make that clear, or `import h2o` for the shipped policy'
    assert [param.name for param in analysis.policy.params] == ["budget"]


def test_a_missing_file_with_a_shipped_name_says_how_to_import_the_shipped_policy() -> None:
    found = only(extending(module='"elsewhere/h2o.kv"'), "KV0114")
    assert found.help == "`import h2o` is the shipped policy"


@pytest.mark.parametrize(
    ("parent", "help"),
    [
        ("Window", "write `import window` above"),
        ("Windw", "did you mean `Window`, from `import window`?"),
        ("Mine", 'import the file that defines it: `import h2o`, a shipped policy, or `import "mine.kv"`, a file'),
    ],
)
def test_extending_what_is_not_imported_says_what_to_import(parent: str, help: str) -> None:
    expect(f'kv 1\npolicy P extends {parent} {{ "d" }}\n', "KV0203", f"unknown policy `{parent}`", parent, help)
    test = f'kv 1\ntest "a" {{\nuse {parent}\nattend 1\nexpect live 1\n}}\n'
    expect(test, "KV0203", f"unknown policy `{parent}`", parent, help)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../../etc/passwd", "h2o", "/tmp/x.kv", "http://host/x.kv", "\\\\host.kv", "a\\nb.kv"]
)
def test_imports_name_kv_files_by_relative_paths(path: str) -> None:
    text = f'kv 1\nimport "{path}"\npolicy P {{ "d" }}'
    assert only(text, "KV0204").message == "an import names a .kv file by a relative path"


def test_an_import_that_cannot_be_read_causes_no_other_errors() -> None:
    text = 'kv 1\nimport "none.kv"\npolicy P extends Nobody { "d"; override score f(age) * something; keep first n }'
    found = only(text, "KV0114")
    assert found.span.text == '"none.kv"'
    assert found.message.endswith("none.kv`: there is no such file")


def test_errors_of_an_imported_file_are_shown_there(tmp_path: Path) -> None:
    analysis = analyse(write(tmp_path, main=extending(module='"./h2o.kv"'), h2o="kv 1\npolicy H2O { score }\n"))
    assert [(found.code, found.file) for found in analysis.diagnostics] == [("KV0101", str(tmp_path / "h2o.kv"))]


def test_warnings_of_an_imported_file_are_not(tmp_path: Path) -> None:
    own = "policy H2O { param budget = 3; param a = 2; score age }\n"
    assert analyse(write(tmp_path, main=extending(module='"./h2o.kv"'), h2o=own)).diagnostics == ()


def test_a_file_that_many_ways_lead_to_is_read_once(tmp_path: Path) -> None:
    """Each of three files a level imports all three below: a walk along every way would never end."""
    for level in range(14):
        for file in "abc":
            below = "".join(f'import "{other}{level - 1}.kv"\n' for other in "abc") if level else ""
            (tmp_path / f"{file}{level}.kv").write_text(f"kv 1\n{below}\nlet {file}{level} = mean(attn)\n")
    text = 'kv 1\nimport "a13.kv"\n\npolicy P {\n  "A test."\n  param budget = 9\n  score a13\n}\n'
    assert analyse(write(tmp_path, main=text)).ok


@pytest.mark.parametrize(
    ("base", "read", "own", "score"),
    [
        ("let worth = mean(attn)", "worth", "let worth = position", "mean(attn)"),
        ("let worth = mean(attn)", "worth", "param worth = 3", "mean(attn)"),
        ("", "norm1(v)", "let norm1(x) = position", "sum(abs(v) over dims)"),
        ("", "worth", "let worth = position", "position"),  # it meant nothing before
    ],
)
def test_a_new_name_changes_nothing_that_is_inherited(tmp_path: Path, base: str, read: str, own: str, score: str) -> None:
    text = f"kv 1\n{base}\n" + body("param budget = 8", f"score {read}").removeprefix("kv 1\n")
    more = "keep where worth > 1" if "worth" in own else "keep where norm1(v) > 1"
    child = f'kv 1\nimport "base.kv"\npolicy Q extends P {{ "d"; {own}; {more} }}'
    policy = analyse(write(tmp_path, base=text, main=child)).policy
    assert policy.score is not None and print_expression(policy.score) == score
    assert "attn" not in print_keep(policy.keeps[0])


def test_two_imported_policies_of_one_name(tmp_path: Path) -> None:
    a, b = (body("param budget = 8", f"score {score}") for score in ("position", "-position"))
    own = 'policy Q extends P { "d" }'
    found = analyse(write(tmp_path, a=a, b=b, main=f'kv 1\nimport "a.kv"\nimport "b.kv"\n{own}')).diagnostics
    assert [(one.code, one.message) for one in found if one.severity == "error"] == [
        ("KV0206", "two imported files have a policy `P`")
    ]
    assert not analyse(write(tmp_path, main=f'kv 1\nimport "a.kv"\n{own}')).diagnostics
