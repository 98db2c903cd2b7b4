"""Models with a vision tower: their table and config.json, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from scalerl.batch.turns import column_of
from scalerl.config import ModelSizes, layout_violations
from scalerl.config.schema import MegatronConfig
from scalerl.models import HFWeights, ModelShape, family_of, read_config, value_model_config
from scalerl.models.adapters import Adapter, counted_trained_params, resolve_targets, trained_params
from scalerl.models.flops import flops_shape
from scalerl.models.vision import vision_config
from tests.tiny_vision import FAMILIES, load_tiny_vision_model, make_tiny_vision_model, picture_rows


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp(family), family)


def test_names_and_shapes_are_those_of_the_files(model: Path) -> None:
    shape = ModelShape.from_hf(model)
    with HFWeights(model) as weights:
        weights.check(family_of(shape), shape)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
    assert family_of(shape).stored_shapes(shape) == stored


def test_every_tensor_of_the_tower_is_whole_on_the_first_stage(model: Path) -> None:
    shape = ModelShape.from_hf(model)
    params = [param for param in family_of(shape).params(shape) if param.of_tower]
    assert {name for param in params for name in param.hf} == {
        name for name in load_file(model / "model.safetensors") if name.startswith(shape.vision.prefix)
    }
    assert all((p.kind, p.stage_part, p.layer) == ("replicated", "first", None) for p in params)


def test_what_config_json_leaves_out_is_what_transformers_takes(family: str) -> None:
    """Of the tower; its sizes are those of the whole model that the class without arguments is."""
    config = FAMILIES[family][0]().to_dict()
    assert vision_config({"model_type": family}) == vision_config(config)


def test_the_language_model_beside_the_tower(tmp_path: Path) -> None:
    """As Qwen2.5-VL is published: its keys are not in text_config, and its rope has an older name."""
    nested = make_tiny_vision_model(tmp_path / "nested", "qwen2_5_vl")
    config = read_config(nested)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = (
        text
        | config
        | {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    )
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert ModelShape.from_config(flat) == ModelShape.from_hf(nested)
    assert AutoConfig.from_pretrained(tmp_path).text_config.rope_parameters["mrope_section"] == [2, 3, 3]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vision_config": [1]}, "vision_config is [1], not an object"),
        ({"vision_config": {"depth": 0}}, "vision_config.depth is 0, not a positive integer"),
        ({"vision_config": {"patch_size": [14, 14]}}, "vision_config.patch_size is [14, 14], not a positive integer"),
        ({"image_token_id": None}, "image_token_id is None, not a token id"),
        ({"text_config": {"rope_parameters": {"mrope_section": [2, 3]}}}, "mrope_section is [2, 3], not three numbers"),
    ],
)
def test_a_tower_that_config_json_does_not_describe(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("[", r"\[")):
        vision_config({"model_type": "qwen3_vl"} | change)


def test_families_without_a_tower_that_runs() -> None:
    assert vision_config({"model_type": "qwen3"}) is vision_config({"model_type": "unknown"}) is None
    assert vision_config({"model_type": "qwen3_5_text", "vision_config": {"depth": 2}}) is None


def test_a_picture_takes_a_token_for_each_square_of_patches(model: Path, family: str) -> None:
    vision = ModelShape.from_hf(model).vision
    assert vision is not None
    sizes = ((4, 6), (2, 8))
    (row,) = picture_rows(family, [sizes])
    assert row["pixel_values"].shape[1] == vision.numbers_per_patch
    num_placeholders = int((row["input_ids"] == vision.image_token_id).sum())
    assert num_placeholders == sum(vision.num_tokens((1, *size)) for size in sizes) == 10


def test_a_value_model_has_the_tower(tmp_path: Path, family: str) -> None:
    """As a critic is saved; of one whose head was tied, too."""
    config = read_config(make_tiny_vision_model(tmp_path, family, tied=True))
    shape = ModelShape.from_config(config)
    saved = value_model_config(config)
    (name,) = config["architectures"]
    assert saved["architectures"] == [name.replace("ForConditionalGeneration", "ForSequenceClassification")]
    assert shape.tie_word_embeddings
    assert ModelShape.from_config(saved) == shape.with_head("value")
    names = family_of(shape).hf_shapes(shape.with_head("value"))
    assert names.keys() - family_of(shape).hf_shapes(shape).keys() == {"score.weight"}


def test_what_is_trained(model: Path) -> None:
    shape = ModelShape.from_hf(model)
    of_tower = {param.name for param in family_of(shape).params(shape) if param.of_tower}
    frozen = replace(shape, frozen_tower=True)
    adapted = replace(shape, adapter=Adapter(4, 8.0, resolve_targets(shape, "all-linear", ())))
    assert of_tower <= {param.name for param, _ in counted_trained_params(shape)}
    assert not of_tower & {param.name for param, _ in counted_trained_params(frozen)}
    assert not any(param.of_tower for param in trained_params(adapted))
    # It is saved all the same: a merge needs no other model.
    assert of_tower <= {param.name for param in trained_params(frozen)}


def test_flops_are_those_that_torch_counts(model: Path, family: str) -> None:
    """Of a whole number of windows, where windows are what the count assumes. Attention as matrix products."""
    shape, patches = ModelShape.from_hf(model), (8, 8)
    (row,) = picture_rows(family, [[patches]])
    tower = load_tiny_vision_model(model, family, attn_implementation="eager").model.visual
    with FlopCounterMode(display=False) as counter:
        output = tower(row["pixel_values"], grid_thw=row["image_grid_thw"])
        forward = counter.get_total_flops()
        (output.pooler_output.sum() + sum(x.sum() for x in getattr(output, "deepstack_features", ()))).backward()
    flops = flops_shape(shape)
    assert flops.tower is not None
    assert flops.tower.forward([64]) == forward
    # The patches have no gradient.
    of_patches = 2 * 64 * shape.vision.numbers_per_patch * shape.vision.hidden_size
    assert flops.tower.train([64]) == counter.get_total_flops() + of_patches
    assert flops.forward([20, 9], [(64, 64), ()]) == flops.forward([20, 9]) + 2 * forward
    # As the column of a batch.
    assert flops.train([20, 9], column_of([(64,), ()])) == flops.train([20, 9]) + 3 * forward
    assert flops.forward([20, 9], column_of([(64,), ()])) == flops.forward([20, 9]) + forward
    frozen = flops_shape(replace(shape, frozen_tower=True))
    assert frozen.train([20], [(64,)]) == flops.train([20]) + forward


def test_the_first_stage_has_the_layers_that_the_tower_feeds() -> None:
    sizes = ModelSizes(num_attention_heads=8, num_kv_heads=4, num_layers=8, ffn_hidden_size=64, deepstack_layers=3)

    def violations(**changes: Any) -> list[str]:
        return layout_violations(sizes, megatron=MegatronConfig(**changes), world_size=8, prefix="megatron")

    assert violations() == violations(pipeline_model_parallel_size=2) == []
    (violation,) = violations(pipeline_model_parallel_size=4)
    assert violation == (
        "megatron.pipeline_model_parallel_size = 4: leaves 2 layers to the first chunk of the first stage, and the "
        "vision tower feeds the model's first 3; set megatron.pipeline_model_parallel_size=1, or give the first chunk "
        "3 layers"
    )
    (violation,) = violations(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert "=1, megatron.virtual_pipeline_model_parallel_size=null, or" in violation
