"""Policies that read tensors of files: packages, caches, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvdsl
from kvdsl import emit
from kvdsl.cli.compile import _compile
from kvdsl.compiler import compile_file
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.tensorfile import Stored, read

LAYERS, HEADS, DIMS = 3, 2, 16
POLICY = """kv 1

policy Filtered {
  "Scores tokens by a direction of their keys, as Q-Filters (2503.02812) do."
  param budget = 20
  tensor filter [layers, heads, dims] from "filter.safetensors"
  score -dot(filter, k)
}
"""


def directions(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(*(shape or (LAYERS, HEADS, DIMS)), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIMS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=32, **sizes)).eval()


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    save_file({"filter": directions()}, tmp_path / "filter.safetensors")
    (tmp_path / "filtered.kv").write_text(POLICY)
    return tmp_path / "filtered.kv"


def read_some(model: LlamaForCausalLM, cache: KVCache, tokens: int = 40) -> KVCache:
    ids = torch.randint(0, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **with_cache(cache))
        for _ in range(3):
            model(ids[:, :1], **with_cache(cache))
    return cache


def test_the_tokens_that_stay_are_those_of_the_formula(model: LlamaForCausalLM, policy: Path) -> None:
    """Found from the keys of the whole text: each decoded token makes the lowest of 21 leave, the newest never."""
    cache = read_some(model, kvdsl.load(policy)(model, backend="torch"))
    full = read_some(model, kvdsl.load("full")(model, backend="torch"))
    # Only the first layer's keys do not depend on what was attended to.
    scores = -torch.einsum("bhsd,hd->bhs", full.layers[0].state.keys.double(), directions()[0].double())
    for row in range(2):
        for head in range(HEADS):
            kept = [39, *sorted(range(39), key=lambda token: -float(scores[row, head, token]))[:19]]
            for newest in range(40, 43):
                kept.append(newest)
                kept.remove(min(kept[:-1], key=lambda token: float(scores[row, head, token])))
            held = cache.positions(0)[row, head]
            assert sorted(held[held >= 0].tolist()) == sorted(kept)


def test_another_model_is_refused_before_any_token(model: LlamaForCausalLM, policy: Path) -> None:
    for shape in ((LAYERS + 1, HEADS, DIMS), (LAYERS, HEADS + 1, DIMS), (LAYERS, HEADS, DIMS - 1)):
        save_file({"filter": directions(0, *shape)}, policy.with_name("filter.safetensors"))
        with pytest.raises(KvdslError) as raised:
            kvdsl.load(policy)(model, backend="torch")
        assert f"`filter` in `filter.safetensors` is {list(shape)} over [layers, heads, dims]" in str(raised.value)
        assert f"this model needs {[LAYERS, HEADS, DIMS]}" in str(raised.value)


def test_what_a_config_does_not_say_the_first_keys_do(model: LlamaForCausalLM, policy: Path) -> None:
    save_file({"filter": directions(0, LAYERS, HEADS + 1, DIMS)}, policy.with_name("filter.safetensors"))
    heads, model.config.num_key_value_heads = model.config.num_key_value_heads, None
    try:
        cache = kvdsl.load(policy)(model, backend="torch")
        with pytest.raises(KvdslError, match="this model needs"):
            read_some(model, cache)
    finally:
        model.config.num_key_value_heads = heads


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (None, "there is no file"),
        ({"filtr": directions()}, "has no tensor `filter`; it has `filtr`"),
        ({"filter": directions()[0]}, "has 2 axes, [2, 16], but the policy declares [layers, heads, dims]"),
        ({"filter": directions().long()}, "is I64"),
    ],
)
def test_a_file_that_does_not_fit_the_policy_is_refused(
    policy: Path, tensors: dict[str, Tensor] | None, message: str
) -> None:
    file = policy.with_name("filter.safetensors")
    file.unlink()
    if tensors is not None:
        save_file(tensors, file)
    with pytest.raises(KvdslError) as raised:
        kvdsl.load(policy)
    assert message in str(raised.value)


def test_numbers_are_finite(model: LlamaForCausalLM, policy: Path) -> None:
    numbers = directions()
    numbers[1, 1, 3] = torch.nan
    save_file({"filter": numbers}, policy.with_name("filter.safetensors"))
    with pytest.raises(KvdslError, match="infinite numbers or NaN"):
        read_some(model, kvdsl.load(policy)(model, backend="torch"))


def test_a_changed_file_is_another_policy(model: LlamaForCausalLM, policy: Path) -> None:
    first = kvdsl.load(policy)
    save_file({"filter": directions(1)}, policy.with_name("filter.safetensors"))
    second = kvdsl.load(policy)
    assert first is not second
    kept = [read_some(model, made(model, backend="torch")).positions(0) for made in (first, second)]
    assert not torch.equal(*kept)
    saved = pickle.dumps(read_some(model, first(model, backend="torch")))
    assert torch.equal(pickle.loads(saved).positions(0), kept[0])


def test_a_file_that_changes_meanwhile_is_taken_as_it_was_read(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what the package has the digest of: the file is read once."""

    def read_and_change(path: Path, names: list[str]) -> dict[str, Stored]:
        found = read(path, names)
        save_file({"filter": directions(2)}, path)
        return found

    monkeypatch.setattr(emit, "read", read_and_change)
    compiled = compile_file(policy)
    (content,) = compiled.data.values()
    assert hashlib.sha256(content).hexdigest() in compiled.files["cache.py"]
    made = _compile("filtered.kv", compiled.policy, policy, policy.parent)
    assert hashlib.sha256(made.files["filtered/tensors.safetensors"]).hexdigest() in made.files["filtered/cache.py"]


def test_copies_and_pickles_keep_them(model: LlamaForCausalLM, policy: Path) -> None:
    cache = read_some(model, kvdsl.load(policy)(model, backend="torch"))
    loaded = torch.load(io.BytesIO(_saved(cache)), weights_only=False)
    loaded.attach(model)
    ids = torch.tensor([[3], [4]])
    for one in (copy.deepcopy(cache), loaded, cache):
        with torch.no_grad():
            model(ids, **with_cache(one))
        assert torch.equal(one.layers[1].state.constants, directions()[1][None])
    assert torch.equal(one.positions(1), loaded.positions(1))


def _saved(cache: KVCache) -> bytes:
    stream = io.BytesIO()
    torch.save(cache, stream)
    return stream.getvalue()


@pytest.mark.nightly
def test_a_package_is_whole_and_moves(model: LlamaForCausalLM, policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    command = [sys.executable, "-m", "kvdsl", "compile", str(policy), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(kvdsl.__file__).parents[1])
    assert subprocess.run([*command, "--check"], capture_output=True, cwd=Path(kvdsl.__file__).parents[1]).returncode == 0
    policy.with_name("filter.safetensors").unlink()
    there = out.rename(tmp_path / "elsewhere")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from filtered import FilteredCache as C; C.spec.tensors.check({'dims': 16})"
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, cwd=Path(kvdsl.__file__).parents[1])
    file = there / "filtered" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    changed = subprocess.run(
        [sys.executable, "-c", code, str(there)], capture_output=True, text=True, cwd=Path(kvdsl.__file__).parents[1]
    )
    assert "is not the file that the policy was compiled with" in changed.stderr
    file.unlink()
    gone = subprocess.run(
        [sys.executable, "-c", code, str(there)], capture_output=True, text=True, cwd=Path(kvdsl.__file__).parents[1]
    )
    assert "cannot be read: compile the policy again" in gone.stderr
