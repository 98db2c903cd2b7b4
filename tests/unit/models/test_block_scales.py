"""Weights in blocks of 8-bit numbers: any slice is what multiplying out would give, and what is missing is named."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.models import (
    HFWeights,
    ModelShape,
    block_scales,
    copy_beside_weights,
    family_of,
    read_config,
    weight_block,
)
from tests import model_configs
from tests.tiny_models import FAMILIES, make_tiny_model, store_as_fp8

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


def test_files_of_minimax_name_the_format_in_full() -> None:
    quantization = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
    assert weight_block({"quantization_config": quantization}) == (128, 128)


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


# --- made for servers ---


def quantized_by_hand(matrix: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """What the matrix means once each block is rounded to the numbers of float8_e4m3fn, from their list."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    values = np.unique(values[np.isfinite(values)])
    meant = np.zeros_like(matrix)
    for row in range(0, matrix.shape[0], block[0]):
        for column in range(0, matrix.shape[1], block[1]):
            part = matrix[row : row + block[0], column : column + block[1]]
            scale = np.abs(part).max() / 448 or 1.0
            nearest = np.abs(part[..., None] / scale - values).argmin(-1)
            meant[row : row + block[0], column : column + block[1]] = values[nearest] * scale
    return meant


@pytest.mark.parametrize("at_a_time", [1, 2**24])
@pytest.mark.parametrize("size", [(256, 128), (200, 131), (3, 5)])
def test_a_matrix_is_rounded_block_by_block(
    size: tuple[int, int], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a block with zeros alone nothing becomes NaN; one large number takes no digits from other blocks."""
    monkeypatch.setattr(block_scales, "_AT_A_TIME", at_a_time)
    matrix = torch.randn(size, generator=torch.Generator().manual_seed(0))
    matrix[0, 0] = 1e4
    matrix[128:, :128] = 0.0
    numbers, scales = block_scales.quantize(matrix)
    assert numbers.shape == matrix.shape and numbers.dtype == torch.float8_e4m3fn
    assert list(scales.shape) == block_scales.scales_shape(list(size), (128, 128)) and scales.dtype == torch.float32
    meant = block_scales.multiplied_out(numbers, scales).numpy()
    # Where two numbers are as near, to within a rounding of float32, either may be taken.
    by_hand = quantized_by_hand(matrix.double().numpy(), (128, 128))
    assert np.isclose(meant, by_hand, rtol=1e-6, atol=0).mean() > 0.999
    assert np.abs(meant - matrix.numpy()).max() <= np.abs(by_hand - matrix.double().numpy()).max() * (1 + 1e-6)


def test_the_numbers_are_those_of_bfloat16_weights(tmp_path: Path) -> None:
    """A model that is quantized, stored and read again is the quantized one: one format for both ways."""
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers, scales = block_scales.quantize(matrix)
    again = block_scales.quantize(block_scales.multiplied_out(numbers, scales))
    assert torch.equal(again[0].view(torch.uint8), numbers.view(torch.uint8))
    torch.testing.assert_close(again[1], scales, rtol=1e-6, atol=0)


def test_a_number_that_is_none_is_not_hidden() -> None:
    matrix = torch.ones(256, 128)
    matrix[5, 7] = float("nan")
    matrix[200, 1] = float("inf")
    meant = block_scales.multiplied_out(*block_scales.quantize(matrix))
    assert meant[:128].isnan().all() and not meant[128:].isfinite().all()


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gpt_oss"}))
def test_servers_in_fp8_have_the_matrices_of_layers_in_8_bits(tmp_path: Path, family: str) -> None:
    """All matrices but embedding, head and what is small; they are what a server in fp8 is smaller by."""
    make_tiny_model(tmp_path, family)
    shape = ModelShape.from_hf(tmp_path)
    sizes = family_of(shape).hf_shapes(shape)
    whole = {name for name, size in sizes.items() if len(size) == 2 and not block_scales.is_quantized(name, size)}
    kinds = {re.sub(r"\d+", "N", name) for name in whole}
    allowed = re.compile(
        r"model\.embed_tokens\.weight|lm_head\.weight|.*\.(gate|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|kv_b_proj)"
        r"\.weight|.*\.linear_attn\..*"
    )
    assert all(allowed.fullmatch(kind) for kind in kinds), kinds
    assert any("o_proj" in name and block_scales.is_quantized(name, size) for name, size in sizes.items())
    assert not any(block_scales.is_quantized(name, size) for name, size in sizes.items() if len(size) != 2)
