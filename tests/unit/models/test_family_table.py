"""Shards, joins and names of the family tables, against numpy and against real Hugging Face models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scalerl.models import HFWeights, ModelShape, family_of, padded_vocab_size
from tests.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model


class CountingSlice:
    """A tensor behind safetensors' slice interface, or a safetensors slice itself, that counts elements read."""

    def __init__(self, source, counts: list[int]) -> None:
        self.source, self.counts = source, counts

    def get_shape(self) -> list[int]:
        return list(self.source.shape) if isinstance(self.source, torch.Tensor) else self.source.get_shape()

    def __getitem__(self, index):
        part = self.source[index]
        self.counts.append(part.numel())
        return part


def shape_of(**changes) -> ModelShape:
    config = dict(
        model_type="qwen2",
        num_hidden_layers=1,
        hidden_size=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=10,
        head_dim=2,
    )
    return ModelShape.from_config(config | changes)


def param_ending(shape: ModelShape, end: str):
    (param,) = [p for p in family_of(shape).params(shape) if p.name.endswith(end)]
    return param


def random_read(param, shape: ModelShape):
    tensors = {n: torch.randn(size) for n, size in param.hf_shapes(shape).items()}
    return tensors, lambda name: CountingSlice(tensors[name], [])


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / request.param
    return make_tiny_model(
        path, request.param, hidden_size=32, num_heads=8, num_kv_heads=4, head_dim=4, vocab_size=300, tied=False
    )


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_hf_to_shards_and_back_is_bitwise_equal(model_dir, tp_size):
    shape = ModelShape.from_hf(model_dir)
    family = family_of(shape)
    original = load_file(model_dir / "model.safetensors")
    back = {}
    with HFWeights(model_dir) as weights:
        for param in family.params(shape):
            shards = [param.shard(weights.read, shape, r, tp_size) for r in range(tp_size)]
            assert all(tuple(s.shape) == param.mcore_shape(shape, tp_size) for s in shards)
            assert all(s.is_contiguous() for s in shards)
            param.add_to_hf(param.join(shards, shape), shape, back)
    assert back.keys() == original.keys()
    for name, tensor in back.items():
        assert tensor.dtype == original[name].dtype
        assert torch.equal(tensor, original[name]), name


@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_shard_goes_into_a_tensor_of_another_dtype(model_dir, tp_size):
    shape = ModelShape.from_hf(model_dir)
    with HFWeights(model_dir) as weights:
        for param in family_of(shape).params(shape):
            for rank in range(tp_size):
                out = torch.full(param.mcore_shape(shape, tp_size), torch.nan, dtype=torch.float64)
                assert param.shard(weights.read, shape, rank, tp_size, out=out) is out
                assert torch.equal(out, param.shard(weights.read, shape, rank, tp_size).double()), param.name


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_reads_only_its_slices(model_dir, tp_size):
    shape = ModelShape.from_hf(model_dir)
    with HFWeights(model_dir) as weights:
        for param in family_of(shape).params(shape):
            for rank in range(tp_size):
                counts: list[int] = []
                shard = param.shard(lambda n, c=counts: CountingSlice(weights.read(n), c), shape, rank, tp_size)
                padding = 0
                if param.kind == "vocab":
                    rows = shard.shape[0]
                    padding = rows - min(max(shape.vocab_size - rank * rows, 0), rows)
                # A rank of padding alone looks at one row for the dtype.
                read_rows_of_padding_rank = shape.hidden_size if padding and padding == shard.shape[0] else 0
                assert sum(counts) == shard.numel() - padding * shape.hidden_size + read_rows_of_padding_rank


def test_params_cover_the_model_in_stage_order(model_dir):
    shape = ModelShape.from_hf(model_dir)
    family = family_of(shape)
    params = family.params(shape)
    assert family.hf_shapes(shape) == {n: tuple(t.shape) for n, t in load_file(model_dir / "model.safetensors").items()}
    stages = [p.stage_part for p in params]
    assert stages == sorted(stages, key=["first", "layer", "last"].index)
    assert {p.expert for p in params} - {None} == set(range(shape.num_experts))
    layers = [p.layer for p in params if p.stage_part == "layer"]
    assert layers == sorted(layers)
    assert set(layers) == set(range(shape.num_layers))
    assert len({p.name for p in params}) == len(params)
    assert all((p.layer is None) == (p.stage_part != "layer") for p in params)


@settings(max_examples=60)
@given(
    kv_heads_per_rank=st.integers(1, 3),
    tp_size=st.sampled_from([1, 2, 3, 4]),
    heads_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 2, 6]),
    bias=st.booleans(),
)
def test_qkv_layout_matches_numpy(kv_heads_per_rank, tp_size, heads_per_group, head_dim, bias):
    kv_heads = kv_heads_per_rank * tp_size
    heads = kv_heads * heads_per_group
    shape = shape_of(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, hidden_size=3)
    param = param_ending(shape, "linear_qkv.bias" if bias else "linear_qkv.weight")
    tensors, read = random_read(param, shape)
    q, k, v = (t.numpy() for t in tensors.values())
    rows = []
    for group in range(kv_heads):
        for head in range(group * heads_per_group, (group + 1) * heads_per_group):
            rows += [q[head * head_dim + d] for d in range(head_dim)]
        rows += [k[group * head_dim + d] for d in range(head_dim)]
        rows += [v[group * head_dim + d] for d in range(head_dim)]
    expected = np.split(np.stack(rows), tp_size)
    shards = [param.shard(read, shape, r, tp_size) for r in range(tp_size)]
    for shard, part in zip(shards, expected, strict=True):
        np.testing.assert_array_equal(shard.numpy(), part)
    full = param.join(shards, shape)
    np.testing.assert_array_equal(full.numpy(), np.stack(rows))
    back = param.to_hf(full, shape)
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_gate_up_shard_is_gate_then_up_and_joins_to_all_gate_then_all_up():
    shape = shape_of()
    param = param_ending(shape, "linear_fc1.weight")
    tensors, read = random_read(param, shape)
    gate, up = (t.numpy() for t in tensors.values())
    shards = [param.shard(read, shape, r, 2) for r in range(2)]
    np.testing.assert_array_equal(shards[0].numpy(), np.concatenate([gate[:4], up[:4]]))
    np.testing.assert_array_equal(shards[1].numpy(), np.concatenate([gate[4:], up[4:]]))
    np.testing.assert_array_equal(param.join(shards, shape).numpy(), np.concatenate([gate, up]))


@pytest.mark.parametrize("vocab_size", [1, 64, 65, 127, 128, 255, 256, 300])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_vocab_is_padded_with_zero_rows(vocab_size, tp_size):
    shape = shape_of(vocab_size=vocab_size)
    param = param_ending(shape, "word_embeddings.weight")
    tensors, read = random_read(param, shape)
    (rows,) = tensors.values()
    padded = padded_vocab_size(vocab_size, tp_size)
    assert padded % (64 * tp_size) == 0
    assert vocab_size <= padded < vocab_size + 64 * tp_size
    full = param.join([param.shard(read, shape, r, tp_size) for r in range(tp_size)], shape)
    expected = np.zeros((padded, shape.hidden_size), dtype=np.float32)
    expected[:vocab_size] = rows.numpy()
    np.testing.assert_array_equal(full.numpy(), expected)
    (back,) = param.to_hf(full, shape).values()
    assert torch.equal(back, rows)


def test_wrong_shapes_are_listed_together():
    shape = shape_of()
    param = param_ending(shape, "linear_qkv.weight")
    tensors = {n: torch.zeros(3, 5) for n in param.hf}
    with pytest.raises(ValueError, match=r"q_proj\.weight.*\(3, 5\).*\(8, 6\).*k_proj\.weight.*v_proj\.weight"):
        param.shard(lambda n: CountingSlice(tensors[n], []), shape, 0, 1)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("linear_qkv.weight", "num_attention_heads 4 is not divisible by tp_size 3"),
        ("linear_fc1.weight", "intermediate_size 8 is not divisible by tp_size 3"),
        ("linear_fc2.weight", "columns 8 is not divisible by tp_size 3"),
    ],
)
def test_a_tp_size_that_does_not_divide_is_refused(end, message):
    shape = shape_of()
    param = param_ending(shape, end)
    _, read = random_read(param, shape)
    with pytest.raises(ValueError, match=message):
        param.shard(read, shape, 0, 3)


def test_join_and_to_hf_refuse_wrong_shapes():
    shape = shape_of()
    param = param_ending(shape, "linear_proj.weight")
    with pytest.raises(ValueError, match=r"linear_proj.*tp rank 1: \(6, 3\)"):
        param.join([torch.zeros(6, 4), torch.zeros(6, 3)], shape)
    with pytest.raises(ValueError, match=r"linear_proj.*\(6, 9\), should be \(6, 8\)"):
        param.to_hf(torch.zeros(6, 9), shape)
    embedding = param_ending(shape, "word_embeddings.weight")
    with pytest.raises(ValueError, match="or more rows"):
        embedding.to_hf(torch.zeros(9, 6), shape)


# --- mixtures of experts ---


def test_experts_are_named_by_their_global_index(tmp_path):
    for family in WITH_EXPERTS:
        shape = ModelShape.from_hf(make_tiny_model(tmp_path / family, family, vocab_size=260, num_experts=6))
        of_experts = [p for p in family_of(shape).params(shape) if p.expert is not None]
        assert len(of_experts) == (4 if shape.linear_bias else 2) * 6 * sum(shape.moe_layers)
        for param in of_experts:
            assert f"layers.{param.layer}.mlp.experts.local_experts.{param.expert}.linear_fc" in param.name
            expert = ".experts." if param.stacked else f".experts.{param.expert}."
            assert all(f".{param.layer}." in name and expert in name for name in param.hf)


def test_dense_and_mixture_layers_have_their_own_rules(tmp_path):
    path = make_tiny_model(
        tmp_path / "m", "qwen3_moe", vocab_size=260, num_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    shape = ModelShape.from_hf(path)
    assert shape.moe_layers == (False, True, False, False)
    names = [p.name for p in family_of(shape).params(shape)]
    for layer, is_mixture in enumerate(shape.moe_layers):
        assert (f"decoder.layers.{layer}.mlp.router.weight" in names) is is_mixture
        assert (f"decoder.layers.{layer}.mlp.linear_fc1.weight" in names) is not is_mixture
    with HFWeights(path) as weights:
        weights.check(family_of(shape), shape)


@pytest.mark.parametrize("q_lora_rank", [None, 16])
@pytest.mark.parametrize("shared", [0, 2])
def test_latent_attention_and_shared_experts_of_config(tmp_path, q_lora_rank, shared):
    path = tmp_path / "m"
    if shared:
        make_tiny_model(path, "deepseek_v3", vocab_size=260, q_lora_rank=q_lora_rank, n_shared_experts=shared)
    else:
        make_tiny_model(path, "deepseek_v3", vocab_size=260, q_lora_rank=q_lora_rank)
        drop_shared_experts(path)
    shape = ModelShape.from_hf(path)
    assert shape.shared_expert_ffn_hidden_size == shared * 32
    assert shape.head_dim == 16 + 8
    with HFWeights(path) as weights:
        weights.check(family_of(shape), shape)


def drop_shared_experts(path: Path) -> None:
    tensors = {n: t for n, t in load_file(path / "model.safetensors").items() if "shared_experts" not in n}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text()) | {"n_shared_experts": 0}
    (path / "config.json").write_text(json.dumps(config))


def test_an_expert_is_split_over_etp(tmp_path):
    shape = ModelShape.from_hf(make_tiny_model(tmp_path / "m", "qwen3_moe", vocab_size=260))
    param = param_ending(shape, "0.mlp.experts.local_experts.1.linear_fc1.weight")
    assert param.mcore_shape(shape, 2) == (2 * 16, 64)
    with pytest.raises(ValueError, match="intermediate_size 32 is not divisible by etp_size 3"):
        param.mcore_shape(shape, 3)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path):
    path = make_tiny_model(tmp_path / "m", "deepseek_v3", vocab_size=260)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2)}, path / "model.safetensors")
    shape = ModelShape.from_hf(path)
    with HFWeights(path) as weights:
        with pytest.raises(ValueError, match=r"unexpected model\.layers\.2\.eh_proj\.weight"):
            weights.check(family_of(shape), shape)
        weights.check(family_of(shape), replace(shape, num_prediction_layers=1))
