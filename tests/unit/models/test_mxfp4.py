"""Experts in mxfp4, as gpt-oss is published: any slice is what transformers multiplies out; what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from scalerl.merge import merge
from scalerl.merge.split import split, split_sizes
from scalerl.models import HFWeights, ModelShape, family_of, read_config
from scalerl.models.mxfp4 import Mxfp4Tensor
from tests import model_configs
from tests.hub_files import Headers, write_headers
from tests.tiny_models import make_tiny_model, store_as_mxfp4

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "m", "gpt_oss", num_layers=2, dtype=torch.bfloat16)


def check(model: Path) -> None:
    shape = ModelShape.from_hf(model)
    with HFWeights(model) as weights:
        weights.check(family_of(shape), shape)


def edit(model: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(model / "model.safetensors") | {f"{GATE_UP}_{end}": t for end, t in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_every_byte_and_scale_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """All 256 bytes; every scale whose products with all values are normal numbers of bfloat16."""
    scales = torch.arange(3, 253, dtype=torch.uint8)[None, :, None].expand(2, -1, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 250, -1, -1).contiguous()
    expected = convert_moe_packed_tensors(blocks, scales)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with HFWeights(tmp_path) as weights:
        tensor = weights.read("x")
        assert isinstance(tensor, Mxfp4Tensor) and tensor.get_shape() == [2, 512, 250]
        assert torch.equal(tensor[:], expected)
        for columns in ((0, 512), (0, 256), (31, 33), (100, 300), (64, 64)):
            for rows in ((0, 250), (125, 250), (3, 4)):
                part = slice(*columns), slice(*rows)
                assert torch.equal(tensor[1, *part], expected[1, *part]), part


def test_a_published_directory_is_read_split_and_merged_as_bfloat16(model: Path, tmp_path: Path) -> None:
    config = read_config(model)
    meant = store_as_mxfp4(model)
    check(model)
    assert ModelShape.from_hf(model).dtype == "bfloat16"
    with HFWeights(model) as weights:
        assert all(torch.equal(weights.read(name)[:], tensor) for name, tensor in meant.items())
    split(model, tmp_path / "split", split_sizes(pp=2, ep=2, etp=2))
    assert merge(tmp_path / "split", tmp_path / "merged").dtype == "bfloat16"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == meant.keys()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, meant[name]) for name, tensor in merged.items())
    assert read_config(tmp_path / "merged") == config


def test_the_published_names_and_sizes_are_those_of_the_table(tmp_path: Path) -> None:
    """gpt-oss-20b's first two layers, without numbers: blocks and scales by the OCP's format, all else bfloat16."""
    config = model_configs.read_config("gpt-oss-20b")
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    shape = ModelShape.from_config(config)
    assert (shape.dtype, shape.sliding_window, shape.sliding_layers) == ("bfloat16", 128, (True, False))
    stored: Headers = {}
    for name, size in family_of(shape).hf_shapes(shape).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, columns, rows = size
            stored[f"{name}_blocks"] = ("U8", (num_experts, rows, columns // 32, 16))
            stored[f"{name}_scales"] = ("U8", (num_experts, rows, columns // 32))
        else:
            stored[name] = ("BF16", size)
    assert stored[f"{GATE_UP}_blocks"] == ("U8", (32, 5760, 90, 16))
    with HFWeights(write_headers(tmp_path, config, stored)) as weights:
        weights.check(family_of(shape), shape)
        assert weights.read(GATE_UP).get_shape() == [32, 2880, 5760]
        # Scales of zero are 2^-127 times the value 0.
        assert not weights.read(GATE_UP)[3, 0:64, 0:32].any()


def test_missing_and_wrong_parts_are_named(model: Path) -> None:
    store_as_mxfp4(model)
    blocks = load_file(model / "model.safetensors")[f"{GATE_UP}_blocks"]
    edit(model, blocks=blocks[:, :-1].contiguous())
    with pytest.raises(ValueError, match=r"gate_up_proj has blocks of shape \(4, 255, 2, 16\) and scales of shape"):
        check(model)
    edit(model, blocks=blocks, scales=None)
    with pytest.raises(ValueError, match=r"missing .*gate_up_proj_scales, the scales of .*gate_up_proj_blocks"):
        check(model)
    edit(model, blocks=None)
    with pytest.raises(ValueError, match=f"1 problems.*\n  missing {GATE_UP}$"):
        check(model)


def test_blocks_without_a_word_in_config_are_refused(model: Path) -> None:
    config = (model / "config.json").read_text()
    store_as_mxfp4(model)
    (model / "config.json").write_text(config)
    with pytest.raises(ValueError, match=f"missing {GATE_UP}"):
        check(model)
