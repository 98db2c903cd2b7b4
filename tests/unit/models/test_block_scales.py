"""Weights in blocks of 8-bit numbers: any slice is what multiplying out would give, and what is missing is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.models import HFWeights, ModelShape, copy_beside_weights, family_of, read_config, weight_block
from tests import model_configs
from tests.tiny_models import make_tiny_model, store_as_fp8

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(
        tmp_path / "m", "qwen3", num_layers=1, hidden_size=192, ffn_size=320, dtype=torch.bfloat16, tied=False
    )


def check(model: Path) -> None:
    shape = ModelShape.from_hf(model)
    with HFWeights(model) as weights:
        weights.check(family_of(shape), shape)


def edit(model: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(model / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_every_slice_is_multiplied_with_its_scales(model: Path) -> None:
    meant = store_as_fp8(model)
    check(model)
    with HFWeights(model) as weights:
        for name, expected in meant.items():
            assert torch.equal(weights.read(name)[:], expected), name
        # 192 rows and 320 columns: the second row of blocks and the third column are not whole.
        down, expected = weights.read(DOWN), meant[DOWN]
        assert down.get_shape() == [192, 320] and down[:].dtype == torch.float32
        for rows in ((0, 192), (96, 192), (127, 129), (130, 131), (5, 5), (128, 192)):
            for columns in ((0, 320), (160, 320), (100, 200), (255, 257), (319, 320)):
                part = slice(*rows), slice(*columns)
                assert torch.equal(down[part], expected[part]), part
            assert torch.equal(down[slice(*rows)], expected[slice(*rows)])
    # Scales of different blocks differ, so that a wrong one would be seen.
    assert len(set(load_file(model / "model.safetensors")[DOWN + "_scale_inv"].flatten().tolist())) == 6


def test_a_rank_of_eight_reads_its_slices_at_the_sizes_of_deepseek_v3(tmp_path: Path) -> None:
    """As configs/deepseek-v3-grpo-512.yaml cuts a layer; 576 rows are four blocks of keys and values, and a half."""
    size, rank, attention, shared = 8, 5, "model.layers.3.self_attn", "model.layers.3.mlp.shared_experts"
    shape = replace(ModelShape.from_config(config := model_configs.read_config("deepseek-v3")), num_experts=1)
    params = {p.name.removeprefix("decoder.layers.3."): p for p in family_of(shape).params(shape) if p.layer == 3}
    generator, meant = torch.Generator().manual_seed(8), {}
    for name, rows, columns in (
        (f"{attention}.kv_a_proj_with_mqa.weight", 576, 7168),
        (f"{shared}.gate_proj.weight", 2048, 7168),
        (f"{shared}.up_proj.weight", 2048, 7168),
        (f"{shared}.down_proj.weight", 7168, 2048),
    ):
        # 127 is no number.
        bits = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=generator)
        scales = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=generator)
        save_file({name: bits.view(torch.float8_e4m3fn), f"{name}_scale_inv": scales}, tmp_path / f"{name}.safetensors")
        of_each = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        meant[name] = bits.view(torch.float8_e4m3fn).float() * of_each
    files = {name + end: f"{name}.safetensors" for name in meant for end in ("", "_scale_inv")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    kv_a, gate, up, down = meant.values()
    mine = slice(rank * 256, (rank + 1) * 256)
    expected = {
        "self_attention.linear_kv_down_proj.weight": kv_a,
        "mlp.shared_experts.linear_fc1.weight": torch.cat([gate[mine], up[mine]]),
        "mlp.shared_experts.linear_fc2.weight": down[:, mine],
    }
    with HFWeights(tmp_path) as weights:
        for name, tensor in expected.items():
            assert torch.equal(params[name].shard(weights.read, shape, rank, size), tensor), name


def test_missing_and_wrong_scales_are_named(model: Path) -> None:
    store_as_fp8(model)
    gate, up = (f"model__layers__0__mlp__{name}_proj__weight_scale_inv" for name in ("gate", "up"))
    edit(model, **{gate: None, up: torch.ones(1, 2)})
    with pytest.raises(ValueError, match="2 problems") as caught:
        check(model)
    assert "missing model.layers.0.mlp.gate_proj.weight_scale_inv" in str(caught.value)
    assert "up_proj.weight_scale_inv has shape (1, 2), blocks of (128, 128) make (3, 2)" in str(caught.value)


def test_scales_without_a_word_in_config_are_refused(model: Path) -> None:
    config = (model / "config.json").read_text()
    store_as_fp8(model)
    (model / "config.json").write_text(config)
    with pytest.raises(ValueError, match="is stored as F8_E4M3, and config"):
        check(model)


def test_the_copy_of_a_config_asks_for_no_quantization(model: Path, tmp_path: Path) -> None:
    plain = json.loads((model / "config.json").read_text())
    store_as_fp8(model)
    assert weight_block(read_config(model)) == (128, 128)
    (tmp_path / "copy").mkdir()
    copy_beside_weights(model, tmp_path / "copy")
    assert read_config(tmp_path / "copy") == plain
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_other_quantizations_are_refused(quantization: dict) -> None:
    with pytest.raises(ValueError, match=r"quantization_config \((fp8|gptq)\): of quantized weights only fp8 \(e4m3\)"):
        weight_block({"quantization_config": quantization})
