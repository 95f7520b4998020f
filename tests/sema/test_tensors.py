"""`tensor` statements: what they say, what is wrong with them, and where their files may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.diagnostics import Diagnostic, Sink
from kvdsl.ir.nodes import Tensor
from kvdsl.ir.printer import print_policy
from kvdsl.sema.files import Analysis
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source

HEAD = 'kv 1\n\npolicy P {\n  "A test."\n  param budget = 8\n'
FILTER = 'tensor filter [layers, heads, dims] from "filter.safetensors"'
SCORE = "score -dot(filter, k)"
W = 'tensor w [layers, heads] from "f.safetensors"'
MATRIX = 'tensor m [layers, heads, rank, dims] from "f.safetensors"'
BY_HEAD = "budget where(w > 0.5, 384, prompt)"


def checked(folder: Path, *lines: str) -> Analysis:
    text = HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"
    return analyse(SourceFile("p.kv", text, folder / "p.kv"))


def errors(folder: Path, *lines: str) -> list[Diagnostic]:
    return [found for found in checked(folder, *lines).diagnostics if found.severity == "error"]


def test_a_tensor_is_read_by_its_name(tmp_path: Path) -> None:
    policy = checked(tmp_path, FILTER, SCORE).policy
    path = str(tmp_path.resolve() / "filter.safetensors")
    assert policy.tensors == (Tensor(name="filter", axes=("layers", "heads", "dims"), file="filter.safetensors", path=path),)
    again = analyse(SourceFile("p.kv", print_policy(policy), tmp_path / "p.kv"))
    assert again.policy == policy


GROUP = 'tensor g [layers, heads, group, dims] from "f.safetensors"'


def test_vectors_of_query_heads(tmp_path: Path) -> None:
    policy = checked(tmp_path, GROUP, "score dot(g, k) + mean(dot(g * q, k))").policy
    assert analyse(SourceFile("p.kv", print_policy(policy), tmp_path / "p.kv")).policy == policy
    (found,) = errors(tmp_path, 'tensor g [heads, group] from "f.safetensors"', "score age")
    assert found.message == "a tensor with the axis `group`, the query heads of a KV head, also needs `heads` and `dims`"
    for lines in (("score age", "keep top 2 by dot(g, k)"), ("score age", "keep where dot(g, k) > 1")):
        (found,) = errors(tmp_path, GROUP, *lines)
        assert found.message.endswith("belongs to a KV head, and cannot read a tensor with one value per query head")
    (found,) = errors(tmp_path, GROUP, "score fold(prev + dot(g, k) over prunes, 0)")
    assert found.code == "KV0308"


def test_who_extends_inherits_it_with_the_folder_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "p.kv").write_text(HEAD + f"  {FILTER}\n  {SCORE}\n}}\n")
    text = 'kv 1\nimport "base/p.kv"\n\npolicy Q extends P {\n  "A test."\n'
    inherited = analyse(SourceFile("q.kv", text + "  keep first 1\n}\n", tmp_path / "q.kv"))
    assert inherited.policy.tensors[0].path == str(tmp_path.resolve() / "base" / "filter.safetensors")
    own = analyse(SourceFile("q.kv", text + f"  override {FILTER}\n}}\n", tmp_path / "q.kv"))
    assert own.policy.tensors[0].path == str(tmp_path.resolve() / "filter.safetensors")
    unread = analyse(SourceFile("q.kv", text + "  override score position\n}\n", tmp_path / "q.kv"))
    assert unread.policy.tensors == ()
    (twice,) = (found for found in analyse(SourceFile("q.kv", text + f"  {FILTER}\n}}\n", tmp_path / "q.kv")).diagnostics)
    assert "needs `override`" in twice.message


@pytest.mark.parametrize(
    "file",
    ["/etc/filter.safetensors", "../filter.safetensors", "a/../../filter.safetensors", "C:filter.safetensors",
     "a\\\\filter.safetensors", "filter.pt", "filter", ""],
)  # fmt: skip
def test_a_path_stays_below_the_folder(tmp_path: Path, file: str) -> None:
    (found,) = errors(tmp_path, f'tensor filter [dims] from "{file}"', SCORE)
    assert found.code == "KV0219"


def test_a_link_does_not_lead_out_either(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "filter.safetensors").write_bytes(b"")
    (inside / "filter.safetensors").symlink_to(tmp_path / "filter.safetensors")
    (inside / "up").symlink_to(tmp_path)
    (found,) = errors(inside, FILTER, SCORE)
    assert found.code == "KV0219"
    assert "is outside the folder" in found.message
    (found,) = errors(inside, FILTER.replace('"f', '"up/f'), SCORE)
    assert found.code == "KV0219"


def test_a_text_has_no_folder() -> None:
    (found,) = analyse(SourceFile("<p>", HEAD + f"  {FILTER}\n  {SCORE}\n}}\n")).diagnostics
    assert (found.code, found.message) == (
        "KV0219",
        "this policy is not in a file, so a tensor's path has no folder to start from",
    )


@pytest.mark.parametrize(
    ("lines", "code", "text"),
    [
        (('tensor filter [layer] from "f.safetensors"', SCORE), "KV0218", "a tensor has no axis `layer`"),
        (('tensor filter [dims, dims] from "f.safetensors"', SCORE), "KV0218", "named twice"),
        (('tensor filter [] from "f.safetensors"', SCORE), "KV0101", "expected a name"),
        (('tensor m [layers, rank] from "f.safetensors"', "score position"), "KV0218", "but this tensor has no `dims`"),
        ((MATRIX, "score m"), "KV0321", "`m` is a matrix, which projects vectors"),
        ((MATRIX, "score dot(project(q, m), k)"), "KV0321", "`project(q, m) * k` mixes the dims of the projection `m` with others"),
        ((MATRIX, "score norm2(project(v, m))"), "KV0321", "a vector over the dims of a key, but `v` is not one"),
        ((MATRIX, "score norm2(project(age, m))"), "KV0321", "a vector over the dims of a key, but `age` is not one"),
        ((MATRIX, "score norm2(project(project(k, m), m))"), "KV0321", "but `project(k, m)` is not one"),
        ((MATRIX, "score norm2(project(k, k))"), "KV0321", "a tensor with the axes `dims` and `rank`, which `k` is not"),
        ((FILTER, "score norm2(project(k, filter))"), "KV0321", "a tensor with the axes `dims` and `rank`, which `filter` is not"),
        ((MATRIX, "score norm2(project(k))"), "KV0306", "`project` takes 2 arguments, but 1 is given"),
        ((MATRIX, "score age", "select top 8 by dot(q, k over sketch)", "sketch top 3 dims by project(q, m) every 2 queries"),
         "KV0321", "the dims of the projection `m`, not those of a key"),
        ((FILTER, "score filtr"), "KV0201", "unknown name `filtr`"),
        ((FILTER, "score filter"), "KV0301", "one number per dim"),
        ((FILTER, "score filter(k)"), "KV0309", "`filter` is not a function"),
        ((FILTER, FILTER, SCORE), "KV0206", "defined twice"),
        (('tensor k [dims] from "f.safetensors"', "score position"), "KV0210", "built-in"),
        (('tensor double [layers] from "f.safetensors"', "score double"), "KV0111", "keyword of C++"),
        ((W, "score w", "select top 9 by dot(q, k)", "pages w"), "KV0308", "one number for all KV heads of a layer, but `w` has one"),
        ((W, BY_HEAD, "score sum(attn over last budget queries)"), "KV0308",
         "this is one number for all KV heads of a layer, but `budget` reads `budget`, which differs between them"),
        ((W, BY_HEAD, "score position", "prefill blocks of budget / 2"), "KV0308", "`budget / 2` reads `budget`, which differs"),
        ((W, "param n = 4 * w", BY_HEAD, "score max_pool(sum(attn), n)"), "KV0308", "`n` reads `w`, which differs"),
        ((W, "score position", "layers w.."), "KV0308", "one number for all KV heads"),
        ((W, "param n = 4 * w", "score position", "layers n.."), "KV0308", "the range of `layers` cannot depend on `w`"),
        ((W, f"{BY_HEAD} across heads", "score position", "when prefill"), "KV0412", "heads that share a budget have equal shares"),
        ((W, BY_HEAD, "score position", "victims shared by heads"), "KV0419", "heads with the same victims keep the same number of tokens"),
        ((W, "score position", "keep first 4 * w", "victims shared by heads"), "KV0419", "but `4 * w` reads `w`, which differs"),
        (('tensor w [layers] from "f.safetensors"', BY_HEAD, "score position", "victims shared by layers"), "KV0419",
         "layers with the same victims keep the same number of tokens, but `where(w > 0.5, 384, prompt)` reads `w`"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_tensor(tmp_path: Path, lines: tuple[str, ...], code: str, text: str) -> None:
    found = errors(tmp_path, *lines)
    assert any(one.code == code and text in one.message for one in found), [(one.code, one.message) for one in found]


def test_a_number_of_a_layer_is_one_for_all_its_heads(tmp_path: Path) -> None:
    layers = 'tensor w [layers] from "f.safetensors"'
    assert errors(tmp_path, layers, BY_HEAD, "score sum(attn)", "victims shared by heads", "prefill blocks of budget") == []


def test_an_unread_tensor_is_warned_of_and_left_out(tmp_path: Path) -> None:
    analysis = checked(tmp_path, FILTER, "score position")
    assert [found.message for found in analysis.diagnostics] == ["`filter` is never used"]
    assert analysis.policy.tensors == ()


def test_the_formatter_sets_the_brackets(tmp_path: Path) -> None:
    text = HEAD + '  tensor  filter [ layers,heads ,dims]  from   "filter.safetensors"\n' + f"  {SCORE}\n}}\n"
    made = format_source(SourceFile("p.kv", text), Sink())
    assert made is not None
    assert f"  {FILTER}\n" in made


def test_brackets_mean_nothing_elsewhere(tmp_path: Path) -> None:
    """Not even behind a tensor on the same line."""
    found = errors(tmp_path, f"{FILTER}; score attn[0]")
    assert [one.message for one in found] == ["values are not indexed"]
