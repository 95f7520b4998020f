"""`kvdsl serve`, up to where vLLM begins: `tests/vllm` goes on from there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvdsl.cli import main
from kvdsl.cli.serve import command
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.settings import parsed
from kvdsl_lab.assets import reference_model_path
from tests.cli.harness import run

MODEL = str(reference_model_path())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdsl.integrations.vllm.launch.installed", lambda: "0.32.0")


def test_the_command_that_it_becomes(vllm: None) -> None:
    done = CliRunner().invoke(command, [MODEL, "--policy", "h2o", "--set", "budget=64", "--dry-run", "--port", "8001"])
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert words[1:5] == ["-m", "kvdsl.integrations.vllm.launch", "serve", MODEL]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert json.loads(options["--additional-config"]) == {"kvdsl": {"policy": "h2o", "budget": 64}}
    assert options["--max-model-len"] == options["--max-num-batched-tokens"] == "2048"
    assert options["--port"] == "8001" and options["--served-model-name"] == MODEL


def test_where_prompts_are_shared_they_come_in_parts(vllm: None) -> None:
    """The policy alone says so; steps are as long as vLLM makes them."""
    done = CliRunner().invoke(command, [MODEL, "--policy", "h2o_answer", "--set", "budget=64", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert json.dumps({"kvdsl": {"policy": "h2o_answer", "budget": 64}}) in done.stdout
    assert "--max-num-batched-tokens" not in done.stdout


def test_how_caches_lie_in_memory_is_told_to_vllm(vllm: None) -> None:
    words = [MODEL, "--policy", "streaming_llm", "--set", "budget=64", "--rope", "cached", "--dry-run"]
    words = shlex.split(CliRunner().invoke(command, words).stdout)
    told = json.loads(dict(zip(words[5::2], words[6::2], strict=True))["--additional-config"])["kvdsl"]
    assert told == {"policy": "streaming_llm", "budget": 64, "rope": "cached"}
    assert parsed(told).spec.rope_cached
    refused = CliRunner().invoke(command, [MODEL, "--policy", "h2o", "--storage", "blocks", "--dry-run"])
    assert isinstance(refused.exception, KvdslError) and "lies in blocks" in str(refused.exception)


def test_a_step_has_room_for_many_short_prompts(vllm: None) -> None:
    done = CliRunner().invoke(command, [MODEL, "--policy", "h2o", "--max-model-len", "512", "--dry-run"])
    assert "--max-model-len 512 --max-num-batched-tokens 2048" in done.stdout


def test_a_users_own_options_stay(vllm: None) -> None:
    words = [MODEL, "--policy", "h2o", "--max-model-len", "512", "--dry-run", "--max-num-batched-tokens=4096"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert "--max-model-len 512" in done.stdout and "--max-num-batched-tokens 512" not in done.stdout


def test_a_trace_is_asked_for(vllm: None, tmp_path: Path) -> None:
    words = [MODEL, "--policy", "h2o", "--kvdsl-trace", str(tmp_path / "one.html"), "--dry-run"]
    words = shlex.split(CliRunner().invoke(command, words).stdout)
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert json.loads(options["--additional-config"])["kvdsl_trace"] == str(tmp_path / "one.html")


def test_a_policy_that_reads_spans_has_roles_marked(vllm: None) -> None:
    words = [MODEL, "--policy", "keep_system", "--middleware", "mine.Own", "--thinks", "[", "]", "--dry-run"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    assert json.dumps({"kvdsl": {"policy": "keep_system", "thinks": ["[", "]"]}}) in done.stdout
    assert "--middleware kvdsl.integrations.vllm.roles.Roles --middleware mine.Own" in done.stdout
    assert "--middleware" not in CliRunner().invoke(command, [MODEL, "--policy", "h2o", "--dry-run"]).stdout


def test_the_manifest_asks_what_can_be_served(vllm: None) -> None:
    text = (Path(__file__).parents[2] / "docs/assets/serving.yaml").read_text()
    deployment, service = yaml.safe_load_all(text)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kvdsl", "serve", "smollm2"]
    done = CliRunner().invoke(command, [MODEL, *container["args"], "--dry-run"])
    assert done.exit_code == 0, done.output
    (port,) = container["ports"]
    assert f"--port {port['containerPort']}" in done.stdout
    assert service["spec"]["ports"][0]["targetPort"] == container["readinessProbe"]["httpGet"]["port"] == port["name"]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "adakv"], "shares a budget"),
        (["--policy", "h2o", "--kvdsl-trace", "no/such/folder.html"], "there is no folder for the trace"),
        (["--policy", "h2o", "--set", "budget=0.5"], "a ratio of each prompt"),
        (["--policy", "h2o_answer", "--set", "budget=0.5"], "a ratio of each prompt"),
        (["--policy", "h2o_answer", "--kvdsl-trace", "one.html"], "cannot be traced"),
        (["--policy", "raas"], "RaaS is not served over prompts that requests share: line 19: `score"),
        (["--policy", "roco_easykv", "--set", "generated=1"], "line 22: `keep top "),
        (["--policy", "tova with budget prompt + budget"], "no `keep` protects all of it; write `keep first prompt`"),
        (["--policy", "h2o", "--set", "budget=many"], "which is not a number"),
        (["--policy", "h2o", "--set", "budgt=64"], "budgt"),
        (["--policy", "snapkv", "--set", "budget=0.5"], "a ratio of each prompt"),
        (["--policy", "h2o", "--additional-config", "{}"], "--policy and --set replace"),
        (["--policy", "h2o", "--additional_config={}"], "--policy and --set replace"),
    ],
)
def test_what_is_refused(vllm: None, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["serve", MODEL, *words]) != 0
    assert said in capsys.readouterr().err


def test_what_one_layer_alone_makes_impossible_is_refused(
    vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "late.kv"
    policy.write_text(
        "kv 1\n\npolicy Late {\n  param budget = 64\n  score sum(attn)\n  keep last where(layer == 1, 0.5 * prompt, 8)\n}\n"
    )
    assert main(["serve", MODEL, "--policy", str(policy)]) != 0
    assert "depend on the prompt" in capsys.readouterr().err


def test_without_vllm_and_with_another_release(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for found, said in ((None, "vLLM is not installed here"), ("0.29.1", "this is 0.29.1")):
        monkeypatch.setattr("kvdsl.integrations.vllm.launch.installed", lambda found=found: found)
        assert said in run(capsys, "serve", MODEL, "--policy", "h2o", "--set", "budget=64", code=2).err


def test_a_name_that_is_a_folder_too(vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "smollm2").mkdir()
    assert main(["serve", "smollm2", "--policy", "h2o"]) != 0
    assert "`smollm2` is a folder here and the name of a model" in capsys.readouterr().err
    assert main(["serve", "./smollm2", "--policy", "h2o"]) != 0
    assert "has no config.json" in capsys.readouterr().err
