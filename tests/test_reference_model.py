"""The shipped model and texts: whole, loadable by transformers alone, and refused when they were tampered with."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvdsl_lab.assets import AssetError, book_index, book_text, check_digests, load_reference_model, reference_model_path
from kvdsl_lab.assets.retrieval import KEYS, key_values, lay_out, pass_key, training_window


def spell(text: str) -> list[int]:
    """A stand-in for a tokenizer: one token for each character, clear of BOS."""
    return [ord(letter) + 1 for letter in text]


@pytest.fixture(scope="module")
def loaded():
    return load_reference_model()


def test_the_compiler_may_import_the_assets_without_torch():
    code = "import sys, kvdsl_lab.assets, kvdsl_lab.assets.retrieval; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shipped_files_match_their_digests_and_sizes():
    folder = reference_model_path()
    check_digests(folder)
    assert (folder / "model.safetensors").stat().st_size <= 32 * 2**20
    assert sum(path.stat().st_size for path in (folder.parent / "books").iterdir()) <= 2**20


def test_tampered_weights_are_refused(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(reference_model_path(), folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(AssetError, match=r"model\.safetensors is not the file"):
        load_reference_model(folder=folder)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(AssetError, match=r"digest\.json"):
        check_digests(tmp_path)
    (tmp_path / "digest.json").write_text('{"model.safetensors": "0"}')
    with pytest.raises(AssetError, match=r"model\.safetensors is missing"):
        check_digests(tmp_path)


def test_transformers_alone_loads_the_folder(loaded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(reference_model_path()).float().eval()
    ids = AutoTokenizer.from_pretrained(reference_model_path())("It was night.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded[0](ids).logits)


def test_the_config_speaks_to_transformers_4_and_5():
    config = json.loads((reference_model_path() / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_the_tokenizer_adds_bos_splits_digits_and_loses_nothing(loaded):
    tokenizer = loaded[1]
    text = "The year 1805 — “naïve”, he said.\n\n  Twice!"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0 and 0 not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert {"1", "8", "0", "5"} <= set(tokenizer.convert_ids_to_tokens(ids))


def test_the_model_predicts_a_book_far_better_than_chance(loaded):
    import torch

    model, tokenizer = loaded
    ids = torch.tensor([tokenizer(book_text()[2000:6000])["input_ids"][:512]])
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    assert loss < math.log(tokenizer.vocab_size) - 2.5


def test_training_json_says_how_the_weights_came_about():
    training = json.loads((reference_model_path() / "training.json").read_text())
    assert {"seed", "preset", "curve", "heldout_loss", "tokens", "active_minutes", "versions"} <= set(training)
    assert training["fraction"] == 1


def test_books_have_an_index_and_unknown_ones_are_named():
    for name, entry in book_index().items():
        assert len(book_text(name)) > 50_000 and {"title", "author", "year"} <= set(entry)
    with pytest.raises(AssetError, match="rock_crystal"):
        book_text("no such book")


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_training_windows_have_their_length_and_derive_from_the_seed(length: int):
    filler = list(range(1000, 1000 + length))
    first, second = ([training_window(np.random.default_rng(seed), filler, length, spell_words, 0) for seed in range(40)]
                     for _ in range(2))  # fmt: skip
    assert first == second
    assert all(len(window) == length and window[0] == 0 for window in first)
    assert len({tuple(window) for window in first}) == 40


def spell_words(text: str) -> list[int]:
    """A token for each word and each digit, as the real tokenizer roughly has it."""
    import re

    return [sum(map(ord, piece)) % 900 + 1 for piece in re.findall(r"\d|\s+|\w+|\W", text)]


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_pass_key_stands_at_its_depth_and_is_asked_for_at_the_end(depth: float):
    task = pass_key(np.random.default_rng(3), depth)
    question, answer = task.questions[0]
    prompt = lay_out(task, [999] * 2000, 600, spell, bos=0, answered=False)
    text = "".join("~" if token == 999 else chr(token - 1) for token in prompt[1:])
    assert len(prompt) == 600 and text.endswith(question)
    assert text.count(answer) == 2 and len(set(answer)) == 5
    before, after = text.split(task.facts[0][1])
    assert abs(len(before) - depth * (before + after).count("~")) <= 1


def test_key_values_ask_for_what_was_told():
    task = key_values(np.random.default_rng(5), count=8, asked=3)
    told = " ".join(text for _, text in task.facts)
    assert len(task.facts) == 8 and len(task.questions) == 3
    assert all(question.strip() + " " + answer in told for question, answer in task.questions)
    assert len(set(KEYS)) == len(KEYS)


def test_too_short_a_window_says_how_long_it_must_be():
    with pytest.raises(ValueError, match="at least"):
        lay_out(pass_key(np.random.default_rng(0)), [1] * 100, 20, spell, bos=0, answered=True)
