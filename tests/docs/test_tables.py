"""Links lead somewhere, named commands exist, and tables name what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvdsl.cli import commands
from kvdsl.compiler import analyse, shipped_policies
from kvdsl.explain.facts import facts
from kvdsl.shipped import found_policies, gallery_policies
from scripts.pages.generation import CELLS
from tests.docs.pages import FOR_THE_SITE, ROOT, documents, read
from tests.hf import test_refusals, test_rope, zoo

NAMES = {path.stem for path in shipped_policies()}
POLICIES, NOTEBOOKS, *WHOLE = FOR_THE_SITE
SHELVES = {POLICIES / path.parent.name / f"{path.stem}.md" for path in gallery_policies() + found_policies()}
"""Their pages are found by the shelf's own, not in the navigation."""
MADE_FOR_THE_SITE = {
    *(POLICIES / f"{stem}.md" for stem in (*NAMES, "index", "gallery/index", "found/index")),
    *(path.with_suffix(".md") for path in NOTEBOOKS.glob("*.ipynb")),
    *WHOLE,
}


def anchors(text: str) -> set[str]:
    """The headings of a page as mkdocs names them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        given = re.search(r"\{ ?#([\w-]+) ?\}", heading)
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(given[1] if given else re.sub(r"[\s-]+", "-", words))
    return found


@pytest.mark.parametrize("document", documents())
def test_links_lead_somewhere(document: str) -> None:
    file, text = ROOT / document, read(document)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", text):
        if target.startswith("https://"):
            continue
        other = (file.parent / target).resolve() if target else file
        if document.startswith("docs/") and other in MADE_FOR_THE_SITE | SHELVES:
            continue
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{target}#{anchor}"
        if document.startswith("docs/"):
            assert (ROOT / "docs") in other.parents, f"{target} is not part of the site"


@pytest.mark.parametrize("document", documents())
def test_commands_exist(document: str) -> None:
    text = read(document)
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
    told = re.findall(r"`kvdsl ([a-z]+)", text) + re.findall(r"^(?:\$ )?kvdsl ([a-z]+)", blocks, re.MULTILINE)
    assert set(told) <= commands().keys()
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    pages = {f"docs/{page}" for page in leaves(site["nav"])}
    written = {page for page in documents() if page.startswith("docs/") and not page.startswith("docs/notes/")}
    written = {page for page in written if not re.match(r"docs/decisions/\d", page)}
    assert pages == written | {str(page.relative_to(ROOT)) for page in MADE_FOR_THE_SITE}


def test_every_decision_is_listed_with_its_status() -> None:
    listed = re.findall(r"^\| (\d+) \| \[(.+)\]\((.+)\) \| (.+) \|$", read("docs/decisions/README.md"), re.MULTILINE)
    files = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [name for _, _, name, _ in listed] == [file.name for file in files]
    for number, title, name, status in listed:
        text = read(f"docs/decisions/{name}")
        assert text.startswith(f"# {number}. {title}\n\nStatus: {status}.\n"), name
        assert text.count("\n") <= 25, name


def leaves(tree: object) -> list[str]:
    """The strings of a tree of lists and mappings."""
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]  # type: ignore[attr-defined]


def rows(document: str, section: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    _, found, rest = read(document).partition(f"\n## {section}\n")
    assert found, section
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


# -- policies ----------------------------------------------------------------------------------------------------------


def test_the_readme_shows_every_policy() -> None:
    shown = [name for _, cell in rows("README.md", "Policies that come with it") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(shown) == sorted(NAMES)


def test_every_policy_has_notes() -> None:
    assert {path.stem for path in ROOT.glob("docs/notes/*.md")} == NAMES


def test_state_costs_what_explain_says() -> None:
    told = {
        name: int(size.replace(",", ""))
        for _, size, names in rows("docs/choosing.md", "What state costs")
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told.items() <= {path.stem: facts(analyse(path).policy).state_bytes for path in shipped_policies()}.items()


def test_figures_are_those_that_were_measured() -> None:
    perplexity = {(row["policy"], row["budget"]): f"{row['ppl']:.1f}" for row in measured("quality_ppl_512.json")}
    for name, *shown in rows("docs/records/quality.md", "Perplexity, reference model"):
        budgets = (None, None) if name == "`full`" else (64, 128)
        assert shown == [perplexity[name.strip("`"), budget] for budget in budgets]

    found = {
        (row["policy"], row["task"], row["budget"]): f"{10 * row['accuracy']:.0f}"
        for row in measured("quality_retrieval_512.json")
    }
    for name, *shown in rows("docs/records/quality.md", "Pass-keys and named numbers, reference model"):
        budgets = (None, None, None) if name == "`full`" else (64, 128, 256)
        cells = [(task, budget) for task in ("pass-key", "key-value") for budget in budgets]
        assert shown == [found[name.strip("`"), task, budget] for task, budget in cells]


def test_the_servers_figures_are_those_that_were_measured() -> None:
    shown = rows("docs/records/serving.md", "Measure your own")
    found = []
    short = measured("vllm_bench_400.json")
    long = [row for row in measured("vllm_bench_1024.json") if row["prompt"] == 2000]
    for table, cache in ((measured("vllm_bench_64.json"), "64 MiB"), (long + short, "1 GiB")):
        full: dict[int, float] = {}
        for row in sorted(table, key=lambda row: (-row["prompt"], row["contestant"] != "full")):
            speed, first = row["output_throughput"], row["median_ttft_ms"] / 1000
            is_full, whole = row["contestant"] == "full", full.setdefault(row["prompt"], speed)
            found.append([
                cache, f"{row['prompt']:,} / {row['new']}", "full attention" if is_full else f"`{row['contestant']}`", f"{speed:.0f}",
                "" if is_full else f"{speed / whole:.2f}", f"{first:.{0 if first >= 10 else 1}f}",
                f"{row['median_tpot_ms']:.0f}", f"{row['at_once']:.0f}", f"{row['preemptions']:.0f}",
            ])  # fmt: skip
    assert shown == found


def test_what_is_said_of_request_rates_is_what_was_measured() -> None:
    for row in measured("vllm_bench_rates.json"):
        rate, name = f"{row['rate']}", "full attention" if row["contestant"] == "full" else f"`{row['contestant']}`"
        first = row["median_ttft_ms"] / 1000
        cells = [
            "all at once" if rate == "inf" else rate, name, f"{row['output_throughput']:.0f}",
            f"{first:.{1 if first >= 1 else 2}f}", f"{row['median_tpot_ms']:.0f}", f"{row['request_goodput']:.2f}",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in read("docs/records/serving.md")


def test_what_is_said_of_long_prompts_is_what_was_measured() -> None:
    speed = {row["contestant"]: row["output_throughput"] for row in measured("vllm_bench_6000.json")}
    share = {name: speed[name] / speed["full"] for name in ("h2o", "streaming_llm")}
    said = f"H2O reaches {share['h2o']:.2f}× full attention's throughput and StreamingLLM {share['streaming_llm']:.2f}×"
    assert said in " ".join(read("docs/records/serving.md").split())


def test_the_engines_figures_are_those_that_were_measured() -> None:
    names = {
        "full": "vLLM, full attention", "openvino": "OpenVINO", "openvino, evicting": "OpenVINO, its own eviction",
        "openvino, 8 bits": "OpenVINO, 8 bits a number",
    }  # fmt: skip
    full: dict[int, float] = {}
    found = []
    for row in sorted(measured("openvino.json"), key=lambda row: -row["prompt"]):
        contestant, speed, first = row["contestant"], row["tokens_per_second"], row["ttft_ms"]
        whole = full.setdefault(row["prompt"], speed)
        found.append([
            f"{row['prompt']:,} / {row['new']}", names.get(contestant, f"vLLM, `{contestant}`"), f"{speed:.0f}",
            "" if contestant == "full" else f"{speed / whole:.2f}", "" if first is None else f"{first / 1000:.1f}",
        ])  # fmt: skip
    assert rows("docs/records/serving.md", "Beside OpenVINO GenAI") == found


def lines_of(file: str) -> list[dict[str, Any]]:
    """What an H200 said, line by line."""
    return [json.loads(line) for line in read(f"results/nvidia_h200/{file}").splitlines()]


def test_what_a_step_takes_beside_torch_is_what_an_h200_said() -> None:
    lines = [line for line in lines_of("kernels.jsonl") if line.get("kind") == "decode" and line["live"] == 4096]
    before, _, now = dict.fromkeys(line["commit"] for line in lines)
    said = {(line["policy"], line["batch"], line["commit"]): line["of_best"] for line in lines if "of_best" in line}
    columns = [(batch, commit) for batch in (1, 8, 64) for commit in (before, now)]
    shown = rows("docs/performance/gpus.md", "A step beside torch's attention")
    assert {line[0] for line in shown} == {policy for policy, *_ in said}
    for policy, *cells in shown:
        assert cells == [f"{said[policy, batch, commit]:.2f}" for batch, commit in columns], policy


def test_what_a_whole_model_takes_is_what_an_h200_said() -> None:
    """First tokens, times those with a static cache of the same run; and tokens behind them."""
    lines = lines_of("model.jsonl")
    first = {
        (line["commit"], line["cache"], line["batch"], line["context"]): line["ttft_s"] for line in lines if "least" in line
    }
    columns = [
        (commit, batch, tokens) for batch, tokens in ((1, 2048), (1, 4096), (8, 1024)) for commit in ("a007f77", "0a0a827")
    ]
    for name, *cells in rows("docs/performance/gpus.md", "A prompt beside torch's attention"):
        for (commit, batch, count), cell in zip(columns, cells, strict=True):
            seconds, static = first.get((commit, name, batch, count)), first[commit, "static", batch, count]
            assert cell == ("" if seconds is None else f"{seconds / static:.2f}"), name
    tokens: dict[tuple[str, int], list[str]] = {}
    for line in lines:
        if "token_ms" in line:
            found = line["token_ms"] if isinstance(line["token_ms"], list) else [line["token_ms"]]
            tokens.setdefault((line["cache"], line["batch"]), []).extend(f"{ms:.1f}" for ms in found)
    for name, *cells in rows("docs/performance/gpus.md", "Tokens of a whole model"):
        assert [cell.split(", ") if cell else None for cell in cells] == [tokens.get((name, batch)) for batch in (1, 16)], (
            name
        )


def test_what_kernels_take_by_themselves_is_what_an_h200_said() -> None:
    """Of `attend` the last run that timed a cut counts, of `settle` the first, which timed all cuts of it."""
    lines = [line for line in lines_of("cuts.jsonl") if "us" in line]
    ordered = [line for line in lines if line["kernel"] == "attend"] + [
        line for line in lines[::-1] if line["kernel"] == "settle"
    ]
    us = {(line["policy"], line["kernel"], line["cut"], line["batch"]): line["us"] for line in ordered}
    cuts = {"attend": ("w4 s3 t14 p2", {"h2o": "w2 s2 t14 p3", "streaming_llm": "w2 s2 t14 p4", "equip_blocks": "w2 s2 t14 p6"}),
            "settle": ("w16 e8192 r128 n1", dict.fromkeys(("h2o", "roco"), "w4 e2048 r128 n4"))}  # fmt: skip
    for line in rows("docs/records/gpu_kernels.md", "Kernels by themselves"):
        kernel = re.match(r"`(attend|settle)`.*\(`(\w+)`\)", line[0])
        assert kernel is not None
        (old, new), (name, policy) = cuts[kernel[1]], kernel.groups()
        for cut, cell in ((old, line[2]), (new[policy], line[4])):
            numbers = [us[policy, name, cut, batch] for batch in (64, 8, 1)]
            assert cell.split(", ") == [f"{x:.0f}" if x >= 20 else f"{x:.1f}" for x in numbers], line


def measured(file: str) -> list[dict[str, Any]]:
    """The rows of a result of `kvdsl eval`."""
    found: list[dict[str, Any]] = json.loads(read(f"results/cpu/{file}"))["rows"]
    return found


# -- what works where --------------------------------------------------------------------------------------------------


def words(cells: list[list[str]]) -> set[str]:
    """What stands in backticks in the first cells."""
    return {word for line in cells for word in re.findall(r"`([^`]+)`", line[0])}


def test_families_that_work_are_those_that_are_tested() -> None:
    tested = {stem for stem, _ in (zoo.FAMILIES | zoo.NOT_YET).values()}
    assert words(rows("docs/support.md", "Models")) == tested


def test_families_that_are_refused_are_those_that_are_tested() -> None:
    assert words(rows("docs/support.md", "Models that are refused")) >= {
        stem for stem, _ in test_refusals.OUT_OF_REACH.values()
    }


def test_compact_positions_are_refused_where_tests_say_so() -> None:
    told = words(rows("docs/support.md", "Compact positions"))
    assert told >= {stem for stem, _, _ in test_rope.REFUSED.values()} - {"Bloom", "Bart", "Llama"}


def test_promises_are_held_by_tests_that_exist() -> None:
    """Every table of support.md that says what holds its rows; and whatever else names a test there."""
    text, promises = read("docs/support.md"), 0
    for head, rule, *rest in (table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)):
        assert rule.startswith("|---"), f"a table begins with {head[:80]}"
        held_by = head.strip("| ").endswith("held by")
        promises += held_by and len(rest)
        assert not held_by or all("`tests/" in row.rpartition(" | ")[2] for row in rest)
    assert promises > 12
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert not test or f"\ndef {test}(" in read(file), f"{file}::{test}"
        assert "\ndef test_" in read(file), file


def test_the_python_interface_has_every_public_member_of_a_cache() -> None:
    """Except how it is put together."""
    from kvdsl.runtime.hf.cache import KVCache

    public = {name for name in vars(KVCache) if not name.startswith("_")} - {"assemble", "spec", "origin"}
    told = {name for member, _ in rows("docs/api.md", "A cache") for name in re.findall(r"\w+", member)}
    assert public <= told, public - told


def test_the_matrix_is_what_the_page_says() -> None:
    report = json.loads(read("results/matrix.json"))
    generated = [row["ways"].get("generate", row["outcome"]).partition(":")[0] for row in report["rows"]]
    served, refused, rest = (generated.count(outcome) for outcome in ("right", "refused", "not tried"))
    release = ".".join(report["environment"]["transformers"].split(".")[:2])
    told = f"Of {len(generated)} models of transformers {release}, kvdsl serves {served} and refuses {refused}; {rest} was not tried,"
    assert told in " ".join(read("docs/support.md").split())
    assert served + refused + rest == len(generated)


def test_every_record_says_how_it_is_made() -> None:
    told = {name for one in re.findall(r"`([\w/.]+)`", read("results/README.md")) for name in (one, Path(one).name)}
    told |= {f"{dtype}_{rows}_{prompt}.json" for dtype, cells in CELLS.items() for rows, prompt in cells}
    for folder in ("", "cpu", "cpu/generate", "fuzz", "gpu", "merging", "nvidia_h200"):
        made = {path.name for path in (ROOT / "results" / folder).glob("*.json*")}
        assert made <= told, made - told
