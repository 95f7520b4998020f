"""The recipe of the reference model, end to end at toy size: train, go on, export, evaluate, pack."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvdsl_lab.assets import load_reference_model
from kvdsl_lab.assets.retrieval import KEYS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lab" / "scripts"))

import evaluate_reference_model as evaluation
import train_reference_model as recipe

pytestmark = pytest.mark.nightly

STEPS, NOTE = 16, 8
"""Steps of each of two runs, and between points of the curve: minutes would make another model on a busy machine."""


def run(command, *arguments: object):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def write_book(path: Path, seed: int) -> None:
    """A book of random sentences in the words of the retrieval tasks."""
    rng = np.random.default_rng(seed)
    lines = (f"The {a} of the {b} is the number. Remember the pass key: {rng.integers(10)}." for a, b in
             rng.choice(KEYS, size=(600, 2)))  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join(lines))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a toy corpus, and what two runs of the recipe, the second going on from the first, made of it."""
    folder = tmp_path_factory.mktemp("recipe")
    for seed in range(3):
        write_book(folder / "corpus" / f"{seed}.txt", seed)
    write_book(folder / "heldout/h.txt", 99)
    common = ("train", "--preset", "toy", "--out", folder / "out", "--corpus", folder / "corpus",
              "--heldout", folder / "heldout", "--note-every", NOTE)  # fmt: skip
    run(recipe.main, *common, "--steps", STEPS)
    run(recipe.main, *common, "--steps", 2 * STEPS)
    run(recipe.main, "export", "--out", folder / "out", folder / "model")
    return folder


def test_training_lowers_the_heldout_loss_and_goes_on_after_a_stop(trained: Path):
    curve = json.loads((trained / "model/training.json").read_text())["curve"]
    assert curve[-1]["heldout"] < curve[0]["heldout"]
    assert [point["step"] for point in curve] == [*range(NOTE, 2 * STEPS + 1, NOTE)]
    assert [point["minutes"] for point in curve] == sorted(point["minutes"] for point in curve)
    assert curve[-1]["window"] == 192


def test_the_export_loads_and_evaluates(trained: Path):
    model, tokenizer = load_reference_model(folder=trained / "model")
    assert model.config.num_key_value_heads == 1 and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    run(evaluation.main, "--model", trained / "model", "--books", trained / "heldout", "--windows", 1, "--trials", 1)
    measured = json.loads((trained / "model/training.json").read_text())["evaluation"]
    assert list(measured["perplexity"]["by_context"]) == ["512", "1024", "2048"]
    assert all(0 < share <= 1 for share in measured["sinks"]["first_4"])
    assert "sinks + window" in (trained / "model/README.md").read_text()


def test_a_pack_holds_all_that_training_needs(trained: Path, tmp_path: Path):
    run(recipe.main, "pack", "--out", trained / "out", tmp_path / "packed.tar.xz")
    recipe.unpack_data(tmp_path / "packed.tar.xz", tmp_path / "out")
    for name in ("tokenizer.json", "train.npy", "heldout.npy"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / "out" / name).read_bytes()


def test_batches_derive_from_seed_and_number(trained: Path):
    windows = recipe.Windows(trained / "out", seed=1)
    batch = windows.batch(7, 2048, 128, 0.5)
    assert batch.shape == (16, 128) and (batch[:, 0] == windows.bos).all()
    assert (batch == recipe.Windows(trained / "out", seed=1).batch(7, 2048, 128, 0.5)).all()
    assert (batch != windows.batch(8, 2048, 128, 0.5)).any()


def test_encoding_by_pieces_is_encoding(trained: Path):
    windows = recipe.Windows(trained / "out", seed=1)
    text = "\n\nThe pass key is 40213. Remember it.\n\nThe number of the house: 9172."
    assert windows.encode(text) == windows.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_checkpoint_of_another_preset_is_refused(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "out", tmp_path / "out")
    shape = recipe.PRESETS["toy"]
    other = recipe.Preset(**{**shape.__dict__, "weight_decay": 0.5})
    with pytest.raises(recipe.click.ClickException, match="another preset"):
        recipe.Trainer(tmp_path / "out", other, "toy", 0.1, seed=1)


def test_a_missing_corpus_is_explained(tmp_path: Path):
    arguments = ["prepare", "--out", str(tmp_path / "out"), "--corpus", str(tmp_path / "none.tar.xz")]
    result = CliRunner().invoke(recipe.main, arguments)
    assert result.exit_code == 1 and "--corpus PATH" in result.output


@pytest.mark.parametrize("name", list(recipe.PRESETS))
def test_the_rate_rises_stays_and_falls_to_zero(name: str):
    preset = recipe.PRESETS[name]
    plateau = (preset.warmup, (preset.warmup + preset.decay_from) / 2, preset.decay_from)
    assert [preset.rate(fraction) for fraction in plateau] == pytest.approx([preset.learning_rate] * 3)
    assert preset.rate(0.0) == preset.rate(1.0) == 0.0
    assert 0 < preset.rate(0.85) < preset.learning_rate


def test_windows_grow_to_the_full_context():
    preset = recipe.PRESETS["cpu"]
    assert [preset.window(fraction) for fraction in (0.0, 0.5, 0.7, 0.8, 1.0)] == [64, 256, 512, 1024, 2048]
    assert preset.share(0.0) > 0.5 and 0.1 <= preset.share(0.1) <= 0.2


def test_a_pause_does_not_use_up_the_budget():
    clock = recipe.ActiveClock()
    for _ in range(10):
        clock.add(1.0)
    clock.add(3600.0)
    assert clock.seconds == 13.0
    clock.new_pace()
    clock.add(40.0)  # a compilation counts in full
    assert clock.seconds == 53.0


def test_a_budget_is_of_minutes_or_of_steps(trained: Path, tmp_path: Path):
    trainer = recipe.Trainer(trained / "out", recipe.PRESETS["toy"], "toy", 2.0, seed=20)
    assert trainer.step == 2 * STEPS and trainer.fraction == trainer.clock.seconds / 120
    trainer.clock.seconds = 90.0
    assert trainer.fraction == 0.75
    trainer.steps = 4 * STEPS
    assert trainer.fraction == 0.5
    both = CliRunner().invoke(recipe.main, ["train", "--out", str(tmp_path), "--minutes", "1", "--steps", "9"])
    assert both.exit_code == 2 and "not both" in both.output


def test_pauses_count_when_the_run_must_end_in_time():
    clock = recipe.ActiveClock(pauses=True)
    for step in [1.0] * 10 + [3600.0]:
        clock.add(step)
    assert clock.seconds == 3610.0


def test_a_run_starts_from_an_exported_model(trained: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(trained / "out", out, ignore=shutil.ignore_patterns("checkpoint.pt"))
    common = ("train", "--preset", "toy", "--out", out, "--note-every", NOTE)
    run(recipe.main, *common, "--start", trained / "model", "--seed", 4, "--steps", NOTE)
    run(recipe.main, "export", "--out", out, tmp_path / "model")
    first, then = (json.loads((folder / "model/training.json").read_text()) for folder in (trained, tmp_path))
    first.pop("evaluation", None)  # of what came out in the end, figures are there
    assert then["before"] == first and then["seed"] == 4
    assert then["curve"][0]["heldout"] < first["curve"][0]["heldout"] - 0.3, "fresh weights begin where the first run began"
    card = (tmp_path / "model/README.md").read_text()
    assert card.count("tokens a step") == 2 and "preset `toy`, then preset `toy`" in card


def test_a_start_that_does_not_fit_is_refused(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "model", tmp_path / "model")
    out = tmp_path / "out"
    shutil.copytree(trained / "out", out, ignore=shutil.ignore_patterns("checkpoint.pt"))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    words = ["train", "--preset", "toy", "--out", str(out), "--start", str(tmp_path / "model"), "--steps", "1"]
    refused = CliRunner().invoke(recipe.main, words)
    assert refused.exit_code == 1 and "another tokenizer" in refused.output
    (tmp_path / "model/training.json").unlink()
    refused = CliRunner().invoke(recipe.main, words)
    assert refused.exit_code == 1 and "holds no training.json" in refused.output
