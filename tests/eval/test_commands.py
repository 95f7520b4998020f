"""`kvdsl run`, `kvdsl eval` and the demo, from the outside."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from kvdsl.cli import main
from kvdsl.cli.run import prompt_ids
from kvdsl.errors import KvdslError
from kvdsl.generation.models import load_model
from kvdsl.generation.report import Generated, size
from kvdsl.generation.text import page, read_text
from kvdsl_lab import demo
from kvdsl_lab.cli.eval import command as evaluate
from tests.cli.harness import run
from tests.eval.conftest import saved


def run_json(capsys, *words: str) -> dict:
    return run(capsys, *words, "--json", code=0).json()


def test_run(capsys, tiny):
    words = ("run", "--policy", "h2o", "--set", "budget=16", "--model", tiny, "--prompt", "Once upon a time, " * 8)
    found = run_json(capsys, *words, "--max-new-tokens", "6", "--backend", "torch")
    assert {"text", "prompt_tokens", "new_tokens", "ttft_ms", "tpot_ms", "cache_bytes", "full_cache_bytes"} <= set(found)
    assert found["format_version"] == "1.0" and found["new_tokens"] == 6
    assert found["cache_bytes"] < found["full_cache_bytes"]
    assert "full" not in found


def test_run_at_a_rate_that_the_beginning_of_the_prompt_would_not_bear(capsys, tiny):
    """40 % of the 64 tokens that the warm-up reads would not hold the 32 that SnapKV protects."""
    words = ("run", "--policy", "snapkv", "--set", "budget=0.4", "--model", tiny, "--prompt", "Once upon a time, " * 30)
    found = run_json(capsys, *words, "--max-new-tokens", "2", "--backend", "torch")
    assert found["prompt_tokens"] * 0.4 > 32 and found["new_tokens"] == 2


def test_run_compared(capsys, tiny, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time, " * 8, encoding="utf-8")
    words = ("run", "--set", "budget=100", "--model", tiny, "--prompt-file", str(prompt), "--max-new-tokens", "5")
    found = run_json(capsys, *words, "--compare", "--backend", "torch")
    assert {"text", "ttft_ms", "tpot_ms", "cache_bytes"} <= set(found["full"])
    assert found["same_prefix_tokens"] == 5 and found["text"] == found["full"]["text"]
    assert found["full"]["cache_bytes"] == found["full_cache_bytes"]


def test_run_prints_a_text_as_it_is(capsys, tiny, monkeypatch):
    """No line breaks, no pictures for what stands between colons."""
    text = "x :key: y a:on:b [red] \t " + 40 * "a long line "
    found = Generated(text, (1, 2, 3, 4), 2, 5.0, (10.0, 10.0, 100.0), 8, 8)
    monkeypatch.setattr("kvdsl.generation.generate.generate", lambda *_: found)
    words = ("run", "--model", tiny, "--prompt", "Hello", "--backend", "torch", "--set", "budget=9")
    shown, cost = run(capsys, *words, code=0).out.splitlines()
    assert shown == text
    assert "first after 5 ms, then 25 tokens a second" in cost, "3 in 120 ms, whatever the median is"


def test_a_prompt_begins_as_the_tokenizer_has_it_begin(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert prompt_ids(tokenizer, "Hello", None) == tokenizer("Hello")["input_ids"]
    bare = type("Bare", (), {"bos_token_id": 1, "__call__": lambda self, text, **_: {"input_ids": [5, 6]}})()
    assert prompt_ids(bare, "Hello", None) == [5, 6], "no BOS where the tokenizer puts none"


def test_bad_prompts_and_models(capsys, tiny, tmp_path):
    for words, said in (
        (["--prompt", "caf\udce9"], "this is not UTF-8 text"),
        (["--model", "~nobody_of_this_name/x", "--prompt", "a"], "there is no model folder ~nobody_of_this_name/x"),
        (["--model", str(broken(tiny, tmp_path)), "--prompt", "a"], "cannot load the model"),
    ):
        err = run(capsys, "run", *words, code=2).err
        assert said in err and "internal error" not in err


def broken(model, folder):
    """A copy of which the weights came half."""
    shutil.copytree(model, folder / "broken")
    weights = folder / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder / "broken"


def test_run_for_people(capsys, tiny):
    words = [
        "run",
        "--model",
        tiny,
        "--prompt",
        "Hello there",
        "--max-new-tokens",
        "3",
        "--backend",
        "torch",
        "--set",
        "budget=9",
    ]
    assert "tokens a second" in run(capsys, *words, code=0).out
    shown = run(capsys, *words, "--compare", code=0).out
    assert "first tokens in common" in shown and "room for" in shown
    words[-1] = "budget=4"
    shown = run(capsys, *words, "--compare", code=0).out
    assert "%)" in shown and "room for" not in shown


def test_a_policy_without_kernels_is_told_in_a_line(capsys, tiny, tmp_path):
    file = tmp_path / "middling.kv"
    score = "sum(attn * median(position over slots))"
    file.write_text(f'kv 1\n\npolicy Middling {{\n  "Mine."\n  param budget = 4\n  score {score}\n}}\n')
    words = ("run", str(file), "--model", tiny, "--prompt", "Hello there", "--max-new-tokens", "3")
    lines = [line for line in run(capsys, *words, code=0).err.splitlines() if "torch backend" in line]
    assert lines == [line for line in lines if line.startswith("warning: `middling` runs on the torch backend: ")]
    assert len(lines) == 1 and f"(line 6: `score {score}`)" in lines[0] and "write `mean`" in lines[0]


def test_a_text_that_is_shorter_than_the_budget(capsys, tiny):
    """What is held and what there is room for, and no share of the full cache that is a hundred times as large."""
    words = ["run", "--model", tiny, "--prompt", "Hello there", "--max-new-tokens", "3", "--backend", "torch"]
    data = run(capsys, *words, "--json", code=0).json()
    assert data["evicted"] is False and data["cache_bytes"] > 10 * data["full_cache_bytes"]
    shown = run(capsys, *words, code=0).out
    assert f"cache {size(data['full_cache_bytes'])} held, room for {size(data['cache_bytes'])}; nothing was evicted" in shown
    shown = run(capsys, *words, "--compare", code=0).out
    assert "RoCo: nothing was evicted" in shown and "%)" not in shown
    assert run(capsys, *words, "--json", "--policy", "full", code=0).json()["evicted"] is None
    assert run(capsys, *words, "--json", "--set", "budget=3", code=0).json()["evicted"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "./nowhere"], "there is no model folder"),
        (["--model", "some/deep/nowhere"], "there is no model folder"),
        (["--backend", "triton"], "needs a GPU"),
        (["--prompt", " "], "the text is empty"),
        (["--prompt", "x", "--prompt-file", __file__], "not both"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--set", "bugdet=3"], "bugdet"),
        (["--policy", "rocko"], "roco"),
        (["--max-new-tokens", "99999", "--prompt", "x"], "fewer"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["run", *words]) in (1, 2)
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and "internal" not in shown.err
    assert not shown.out


def test_model_folders(tmp_path):
    with pytest.raises(KvdslError, match=r"no config\.json"):
        load_model(str(tmp_path))
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(KvdslError, match="is a file"):
        load_model(str(file))


def test_an_unreachable_hub_is_one_line(monkeypatch):
    import transformers

    def refuse(*_, **__):
        raise OSError("We couldn't connect to the hub.\nMany more words\nof advice.")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr("kvdsl.models.hub.answers", lambda: True)
    with pytest.raises(KvdslError) as error:
        load_model("someone/some-model")
    assert str(error.value) == "cannot load the model `someone/some-model`: We couldn't connect to the hub."


def test_texts(tmp_path):
    assert len(page().split()) > 300 and page().endswith(".")
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(KvdslError, match="UTF-8"):
        read_text(broken)
    broken.write_text("  \n", encoding="utf-8")
    with pytest.raises(KvdslError, match="is empty"):
        read_text(broken)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("ppl --budgets 8 --tokens 24 --stretches 1", {"policy", "budget", "ppl", "tokens"}),
        (
            "fidelity --budgets 8 --prompt-tokens 24 --new-tokens 4 --prompts 1",
            {"policy", "budget", "rouge1", "rouge2", "rougeL", "bleu", "same_prefix_tokens"},
        ),
        ("retrieval --budgets 32 --length 160 --trials 1 --pairs 2", {"policy", "budget", "task", "accuracy"}),
    ],
)
def test_evaluations(words, keys, tiny):
    pytest.importorskip("sacrebleu")
    done = CliRunner().invoke(
        evaluate, [*words.split(), "--policies", "roco", "--model", tiny, "--backend", "torch", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["format_version"] == "1.0" and found["environment"]["dtype"] == "float32"
    assert all(keys <= set(row) for row in found["rows"])


def test_quick_has_other_defaults_and_leaves_alone_what_is_given(tiny):
    words = f"ppl --tokens 16 --quick --policies window --budgets 8 --model {tiny} --backend torch --json"
    done = CliRunner().invoke(evaluate, words.split())
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["stretches"], found["stretch_tokens"]) == (6, 16)
    assert [row["budget"] for row in found["rows"]] == [8]
    for command in ("ppl", "fidelity", "retrieval"):
        told = CliRunner().invoke(evaluate, [command, "--help"]).output
        assert "--quick" in told and f"--budgets {'32' if command == 'ppl' else '64,128'}" in " ".join(told.split())


def test_an_evaluation_ends_when_it_says(tiny):
    words = f"ppl --policies full,window --budgets 8 --tokens 16 --stretches 2 --minutes 1e-9 --backend torch --model {tiny}"
    done = CliRunner().invoke(evaluate, words.split())
    assert done.exit_code == 0, done.output
    assert "time ran out: 1 of the 15 tokens of each stretch were read" in done.stderr


def test_evaluations_for_people(tiny):
    words = f"ppl --policies full,window --budgets 8 --tokens 16 --stretches 1 --backend torch --model {tiny}"
    done = CliRunner().invoke(evaluate, words.split())
    assert done.exit_code == 0 and "streaming" not in done.stdout and "window" in done.stdout


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}\n"


@pytest.fixture
def chatting(tmp_path):
    """The reference model with a chat template, as a folder."""
    model, tokenizer = load_model(None)
    tokenizer.chat_template = CHAT
    return saved(model, tokenizer, tmp_path / "chatting")


def counted(length: int) -> dict:
    rows = [{"policy": policy, "budget": None if policy == "full" else demo.RATE, "mean": right / 8, "items": 8}
            for right, policy in enumerate(("snapkv", "chunkkv", "full"), 5)]  # fmt: skip
    column = {"name": "fact: known", "rows": [*rows, {**rows[0], "budget": 0.5}]}
    return {"columns": [column], "length": length, "seed": 0, "model": "a model", "dtype": "float32"}


def test_the_demo_finds_and_goes_on(tmp_path, monkeypatch, chatting):
    monkeypatch.chdir(tmp_path)
    counts = tmp_path / "fact.json"
    counts.write_text(json.dumps(counted(256)))
    monkeypatch.setattr(demo, "COUNTS", counts)
    monkeypatch.setattr("kvdsl.busy.use_threads", lambda asked: "other programs keep the cores busy")
    done = CliRunner(env={"COLUMNS": "140"}).invoke(
        demo.main, ["--new-tokens", "4", "--model", chatting, "--out", "demo_packages"]
    )
    assert done.exit_code == 0, done.output
    assert "The secret code of the" in done.stdout and "right of 8" in done.stdout
    answers = {
        line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if "tokens/s" not in line and " s  " in line
    }
    assert answers == {"full": "7", "ChunkKV": "6", "SnapKV": "5"}
    assert "RoCo, 128 tokens" in done.stdout
    assert "other programs keep the cores busy" in done.stderr
    assert (tmp_path / "demo_packages" / "chunkkv" / "cache.py").exists()


def test_the_demo_without_its_model(tmp_path, monkeypatch):
    def refused(*args):
        raise KvdslError("the package index is closed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVDSL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("kvdsl.models.fetch.get", refused)
    done = CliRunner(env={"COLUMNS": "140"}).invoke(
        demo.main, ["--new-tokens", "2", "--out", "demo_alone", "--kv-dtype", "int8"]
    )
    assert done.exit_code == 0, done.output
    assert "--kv-dtype int8 --compare --prompt-file" in done.stdout, "the demo shows the command for a larger model"
    assert f'ChunkKVCache(model, budget={demo.RATE}, kv_dtype="int8")' in done.stdout
    assert "smollm2 cannot be had (the package index is closed)" in " ".join(done.stdout.split())
    assert "Going on with a text" in done.stdout and "Finding a fact" not in done.stdout


@pytest.mark.parametrize("name", ["json", "a.b", "class", "/"])
def test_the_demo_refuses_what_cannot_be_imported(name):
    done = CliRunner().invoke(demo.main, ["--out", name])
    assert done.exit_code == 2 and "cannot be imported as the policy's package" in " ".join(done.output.split())


def test_what_goes_wrong_in_the_demo_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo", "--out", "/proc/nowhere_to_write"])
    with pytest.raises(SystemExit) as ended:
        demo.run()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "/proc/nowhere_to_write" in said and "Traceback" not in said


def test_what_the_demo_counts_is_there():
    right, items = demo.how_many(json.loads(demo.COUNTS.read_text(encoding="utf-8")))
    assert items == 20
    assert set(demo.FINDING.values()) | {"full"} <= set(right)
    assert all(0 <= count <= items for count in right.values())


def test_budgets_are_given_once(capsys):
    told = run(capsys, "eval", "ppl", "--policies", "h2o", "--set", "budget=32", code=2).err
    assert "give budgets with --budgets, not with --set" in told
