"""`kvdsl calibrate`: the statistics against their definitions, what a policy asks for, and the command from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import kvdsl
from kvdsl.cli import main
from kvdsl.compiler import analyse, find_policy
from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.calibrate import retrieval_heads
from kvdsl_lab.calibrate.request import wanted
from kvdsl_lab.calibrate.run import calibrate, read_twice, steps
from kvdsl_lab.calibrate.statistics import statistics
from kvdsl_lab.eval.recording import Recording, record
from tests.cli.harness import run

SINKS, RECENT = 2, 5
CHANNELS = 3
KNOWN = statistics(SINKS, RECENT, CHANNELS)
POLICY = """kv 1

policy Mine {{
  "A test."
  param budget = 24
{}
}}
"""


@pytest.fixture
def ids(model) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (3, 32), generator=torch.Generator().manual_seed(0))


def recordings(model, ids: Tensor) -> list[list[Recording]]:
    """By layer, of every stretch."""
    return [list(layer) for layer in zip(*(record(model, stretch) for stretch in ids.split(1)), strict=True)]


def found(model, ids: Tensor, name: str) -> Tensor:
    return calibrate(model, ids, [KNOWN[name]])[name]


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_filter_is_the_first_right_singular_vector_of_the_queries(model, ids: Tensor) -> None:
    filters = found(model, ids, "q-filters")
    for layer, parts in enumerate(recordings(model, ids)):
        query = torch.cat([part.query[0] for part in parts], 2).double()  # [kv_heads, group, tokens, dim]
        expected = torch.zeros(query.shape[0], query.shape[3], dtype=torch.float64)
        for head, of_head in enumerate(query):
            for vectors in of_head:
                direction = torch.linalg.svd(vectors, full_matrices=False).Vh[0]
                expected[head] += direction * (vectors @ direction).mean().sign() / len(of_head)
        torch.testing.assert_close(filters[layer].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_mean_query_is_that_of_the_group_and_the_text(model, ids: Tensor) -> None:
    means = found(model, ids, "query-mean")
    for layer, parts in enumerate(recordings(model, ids)):
        expected = torch.cat([part.query[0] for part in parts], 2).mean((1, 2))
        torch.testing.assert_close(means[layer], expected, rtol=1e-4, atol=1e-5)


def test_an_axis_of_keys_is_the_first_of_their_principal_ones(model, ids: Tensor) -> None:
    axes = found(model, ids, "key-pca")
    for layer, parts in enumerate(recordings(model, ids)):
        keys = torch.cat([part.key[0] for part in parts], 1).double()
        for head, vectors in enumerate(keys):
            direction = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False).Vh[0]
            direction = direction * (vectors.mean(0) @ direction).sign()
            torch.testing.assert_close(axes[layer, head].double(), direction, rtol=1e-3, atol=1e-4)


def test_a_basis_of_keys_has_the_first_principal_axes(model, ids: Tensor) -> None:
    basis = found(model, ids, "key-axes")
    assert basis.shape[3] == CHANNELS
    torch.testing.assert_close(basis[..., 0], found(model, ids, "key-pca"))
    for layer, parts in enumerate(recordings(model, ids)):
        keys = torch.cat([part.key[0] for part in parts], 1).double()
        for head, vectors in enumerate(keys):
            axes = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False).Vh[:CHANNELS].T
            torch.testing.assert_close(
                (basis[layer, head].double() * axes).sum(0).abs(), torch.ones(CHANNELS).double(), rtol=1e-3, atol=0
            )


def test_heavy_channels_are_those_of_the_largest_products_over_all_pairs(model, ids: Tensor) -> None:
    channels = found(model, ids, "heavy-channels")
    for layer, parts in enumerate(recordings(model, ids)):
        query = torch.cat([part.query[0] for part in parts], 2).flatten(1, 2).double()
        keys = torch.cat([part.key[0] for part in parts], 1).double()
        for head in range(len(keys)):
            products = (query[head][:, None] * keys[head]).abs().mean((0, 1))
            assert set(channels[layer, head].nonzero()[:, 0].tolist()) == set(products.topk(CHANNELS).indices.tolist())
            assert channels[layer, head].sum() == CHANNELS


def test_a_head_retrieves_as_its_output_changes_without_the_middle(model, ids: Tensor) -> None:
    ranks = found(model, ids, "retrieval-heads")
    changes = torch.zeros(ranks.shape, dtype=torch.float64)
    twice = read_twice(ids)
    for layer, parts in enumerate(recordings(model, twice)):
        for part in parts:
            logit = torch.einsum("hgqd,hsd->hgqs", part.query[0], part.key[0]).double() * part.call.scaling
            place = torch.arange(part.length)
            age = place[:, None] - place
            outs = []
            for hidden in (age < 0, (age < 0) | ((place >= SINKS) & (age >= RECENT))):
                probs = logit.masked_fill(hidden, -torch.inf).softmax(-1)
                outs.append((probs @ part.value[0][:, None].double())[:, :, part.length // 2 :])
            change = (outs[0] - outs[1]).norm(dim=-1) / outs[0].norm(dim=-1)
            changes[layer] += change.mean((1, 2)) / len(parts)
    assert len(set(changes.flatten().tolist())) == changes.numel()
    for place, index in enumerate(changes.flatten().argsort().tolist()):
        assert ranks.flatten()[index] == pytest.approx((place + 0.5) / changes.numel())
    torch.testing.assert_close(found(model, ids, "streaming-heads"), 1 - ranks)
    torch.testing.assert_close(
        found(model, ids, "head-importance"), (changes / changes.mean()).float(), rtol=1e-4, atol=1e-5
    )


def test_a_head_that_sees_all_there_is_does_not_change(model, ids: Tensor) -> None:
    (layer, *_) = record(model, read_twice(ids)[:1])
    changes = retrieval_heads.seen(layer, sinks=0, recent=layer.length)
    assert changes.count == layer.length // 2
    assert not changes.total.any()
    assert (retrieval_heads.seen(layer, sinks=0, recent=1).total > 0).all()


def test_a_text_is_read_once_for_all_that_ask_for_it(model, ids: Tensor) -> None:
    asked = [KNOWN[name] for name in ("q-filters", "key-pca", "retrieval-heads")]
    ticks: list[None] = []
    together = calibrate(model, ids, asked, lambda: ticks.append(None))
    assert len(ticks) == steps(ids, asked) == 2 * len(ids)
    for one in asked:
        assert torch.equal(together[one.name], found(model, ids, one.name))


# -- what a policy asks for --------------------------------------------------------------------------------------------


def asks(folder: Path, *lines: str, chosen: dict[str, str] | None = None) -> dict[str, str]:
    (folder / "mine.kv").write_text(POLICY.format("".join(f"  {line}\n" for line in lines)))
    policy = analyse(folder / "mine.kv").policy
    return {one.tensor.name: one.statistic.name for one in wanted(policy, chosen or {}, KNOWN)}


FILTER = 'tensor {} [layers, heads, dims] from "f.safetensors"'


def test_a_name_says_what_it_means_unless_something_is_chosen(tmp_path: Path) -> None:
    assert asks(tmp_path, FILTER.format("filter"), "score dot(filter, k)") == {"filter": "q-filters"}
    chosen = {"filter": "key-pca"}
    assert asks(tmp_path, FILTER.format("filter"), "score dot(filter, k)", chosen=chosen) == {"filter": "key-pca"}
    line = 'tensor streaming [heads, layers] from "duo.safetensors"'
    assert asks(tmp_path, line, "score position * streaming") == {"streaming": "streaming-heads"}


@pytest.mark.parametrize(
    ("stem", "statistic"),
    [("duo_attention", "retrieval-heads"), ("q_filters", "q-filters"), ("double_sparsity", "heavy-channels"), ("loki", "key-axes"),
     ("headkv", "head-importance")],
)  # fmt: skip
def test_shipped_policies_ask_for_what_there_is(stem: str, statistic: str) -> None:
    (one,) = wanted(analyse(find_policy(stem)).policy, {}, KNOWN)
    assert one.statistic.name == statistic


@pytest.mark.parametrize(
    ("lines", "chosen", "message"),
    [
        (("score position",), {}, "Mine reads no tensors: only a policy with a `tensor` line"),
        ((FILTER.format("w"), "score dot(w, k)"), {}, "nobody knows what `w` is to hold: say `--tensor w=q-filters`"),
        (('tensor w [layers, heads] from "f.safetensors"', "score w * position"), {}, "say `--tensor w=retrieval-heads`"),
        ((FILTER.format("filter"), "score dot(filter, k)"), {"filtre": "q-filters"}, "no tensor `filtre`; did you mean `filter`?"),
        ((FILTER.format("filter"), "score dot(filter, k)"), {"filter": "q-filter"}, "did you mean `q-filters`?"),
        ((FILTER.format("filter"), "score dot(filter, k)"), {"filter": "svd"}, "there are `q-filters`, `query-mean`, `key-pca`"),
        ((FILTER.format("retrieval"), "score dot(retrieval, k)"), {}, "over [layers, heads, dims], but retrieval-heads is over"),
    ],
)  # fmt: skip
def test_what_nobody_can_tell_is_refused(
    tmp_path: Path, lines: tuple[str, ...], chosen: dict[str, str], message: str
) -> None:
    with pytest.raises(KvdslError) as raised:
        asks(tmp_path, *lines, chosen=chosen)
    assert message in str(raised.value)


# -- the command -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_the_policy_reads(
    model, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        '  tensor filter [dims, heads, layers] from "made/f.safetensors"\n'
        '  tensor streaming [layers, heads] from "made/duo.safetensors"\n'
        "  score dot(filter, k) * streaming\n"
    )
    (tmp_path / "mine.kv").write_text(POLICY.format(lines))
    command = ["calibrate", str(tmp_path / "mine.kv"), "--model", tiny, "--tokens", "128", "--length", "64"]
    assert "a streaming head would attend to 16 + 64 tokens" in run(capsys, *command, code=2).err
    command += ["--sinks", "2", "--recent", "8"]
    result = run(capsys, *command, "--json", code=0).json()
    assert result["tokens"] == 128
    assert [one["tensors"][0]["statistic"] for one in result["files"]] == ["q-filters", "streaming-heads"]
    with safe_open(tmp_path / "made" / "f.safetensors", "pt") as file:
        values, notes = file.get_tensor("filter"), file.metadata()
    assert notes["filter"] == "q-filters" and notes["tokens"] == "128"
    cache = kvdsl.load(tmp_path / "mine.kv")(model, backend="torch")
    with torch.no_grad():
        model(torch.arange(30)[None], **with_cache(cache))
    assert torch.equal(cache.layers[1].state.constants[0], values[:, :, 1].T)
    assert int((cache.positions(1) >= 0).sum(-1).max()) == 24

    assert "is there already: give --force to write it anew" in run(capsys, *command, code=2).err
    assert "`filter`, the mean query" in run(capsys, *command, "--force", "--tensor", "filter=query-mean", code=0).out
    assert main([*command, "-o", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "made" / "duo.safetensors").exists()


def test_the_file_of_a_shipped_policy_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "calibrate", "duo_attention", "--force", code=2).err
    assert "comes with kvdsl, for the policy's own tests: write `policy Mine = DuoAttention with tensor" in told
    assert 'tensor retrieval [layers, heads] from "mine.safetensors"' in told


def test_a_malformed_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "`filter` is not of the form NAME=STATISTIC" in run(capsys, "calibrate", "h2o", "--tensor", "filter", code=2).err


# -- before rotation ---------------------------------------------------------------------------------------------------


def unrotated(model, ids: Tensor) -> Tensor:
    """The queries of the first layer, [kv_heads, group, all stretches', dims], by the model's own projection."""
    attention = model.model.layers[0].self_attn
    captured: list[Tensor] = []
    hook = attention.q_proj.register_forward_hook(lambda module, given, out: captured.append(out))
    with torch.inference_mode():
        for stretch in ids.split(1):
            model(stretch)
    hook.remove()
    heads, groups = model.config.num_key_value_heads, model.config.num_attention_heads // model.config.num_key_value_heads
    queries = torch.cat([one[0, 4:] for one in captured])
    return queries.view(len(queries), heads, groups, -1).permute(1, 2, 0, 3).double()


def test_moments_of_queries_before_they_are_rotated(model, ids: Tensor) -> None:
    queries = unrotated(model, ids)
    mean = queries.mean(2)
    torch.testing.assert_close(found(model, ids, "query-centres")[0].double(), mean, atol=1e-5, rtol=1e-4)
    about = queries - mean.unsqueeze(2)
    covariance = about.transpose(-1, -2) @ about / queries.shape[2]
    root = found(model, ids, "query-roots")[0].double()
    torch.testing.assert_close(root @ root.transpose(-1, -2), covariance, atol=1e-4, rtol=1e-3)
    first, second = queries.chunk(2, -1)
    excess = torch.hypot(first, second).mean(2) - torch.hypot(*mean.chunk(2, -1))
    torch.testing.assert_close(
        found(model, ids, "query-excess")[0].double(), torch.cat([excess, excess], -1), atol=1e-5, rtol=1e-3
    )


def test_a_sketch_is_drawn_for_every_head(model, ids: Tensor) -> None:
    sketch = found(model, ids, "random-sketch")
    assert (
        sketch.shape[-1] == CHANNELS and sketch.flatten(0, 1).flatten(1).unique(dim=0).shape[0] == sketch[..., 0, 0].numel()
    )
    assert float(sketch.square().mean()) == pytest.approx(1 / CHANNELS, rel=0.3)


@pytest.mark.parametrize("stem", ["expected_attention_stats", "triattention", "leverage_score"])
def test_the_gallery_knows_what_to_ask_for(stem: str) -> None:
    asked = {one.tensor.name: one.statistic.name for one in wanted(analyse(find_policy(stem)).policy, {}, KNOWN)}
    assert asked in (
        {"centre": "query-centres", "root": "query-roots"},
        {"centre": "query-centres", "excess": "query-excess"},
        {"sketch": "random-sketch"},
    )
