"""The released files of Qwen3.5: a language model, its vision tower, and layers that predict further tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from scalerl.config.schema import RolloutConfig
from scalerl.merge import main, merge
from scalerl.merge.split import split, split_sizes
from scalerl.models import HFWeights, ModelShape, family_of
from scalerl.rollout.servers.embedded.file_tensors import file_tensors
from scalerl.rollout.servers.engines import ENGINES
from tests.tiny_models import make_tiny_model, store_as_released

TEXT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
CLASSES = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300}


@pytest.fixture(params=TEXT)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A model as transformers saves the language model, and with the same numbers as the released files have it."""
    text = make_tiny_model(tmp_path / "text", TEXT[request.param], **SIZES)
    released = Path(shutil.copytree(text, tmp_path / "released"))
    store_as_released(released)
    return text, released


def test_the_shape_without_the_tower_is_that_of_the_language_model(both: tuple[Path, Path]) -> None:
    text, released = map(ModelShape.from_hf, both)
    assert released.vision is not None and released.vision.is_optional
    assert released.without_tower() == replace(text, model_type=text.model_type.removesuffix("_text"))


def test_names_and_shapes_are_those_of_transformers(both: tuple[Path, Path]) -> None:
    shape = ModelShape.from_hf(both[1])
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[shape.model_type])(AutoConfig.from_pretrained(both[1]))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert family_of(shape).stored_shapes(shape) == theirs


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_shard_is_that_of_the_language_model(both: tuple[Path, Path], tp_size: int) -> None:
    shards = []
    for path in both:
        shape = ModelShape.from_hf(path)
        with HFWeights(path) as weights:
            weights.check(family_of(shape), shape)
            shape = shape.without_tower()
            weights.check(family_of(shape), shape)
            shards.append(
                {
                    (param.name, rank): param.shard(weights.read, shape, rank, tp_size)
                    for param in family_of(shape).params(shape)
                    for rank in range(tp_size)
                }
            )
    assert shards[0].keys() == shards[1].keys()
    assert [name for name in shards[0] if not torch.equal(shards[0][name], shards[1][name])] == []


def test_a_merged_model_has_every_tensor_of_the_files(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Bit for bit, with the tensors that no run trains."""
    split(both[1], tmp_path / "run" / "actor", split_sizes(tp=2))
    merge(tmp_path / "run" / "actor", tmp_path / "merged", hf_model_path=both[1], max_shard_bytes=50_000)
    original = load_file(both[1] / "model.safetensors")
    merged: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        merged |= load_file(file)
    assert merged.keys() == original.keys()
    for name, tensor in original.items():
        assert merged[name].dtype == tensor.dtype and torch.equal(merged[name], tensor), name


def test_a_merge_without_the_tower_is_refused(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a checkpoint that has the language model alone."""
    split(both[0], tmp_path / "run" / "actor", split_sizes())
    shutil.copy(both[1] / "config.json", tmp_path / "run" / "actor" / "huggingface")
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "run" / "actor")]
    assert main([*arguments, "--target_dir", str(tmp_path / "merged")]) == 2
    assert "model.visual. and mtp.*" in (error := capsys.readouterr().err) and "--hf_model_path" in error
    # The language model alone.
    assert main([*arguments, "--target_dir", str(tmp_path / "merged"), "--hf_model_path", str(both[0])]) == 2
    assert f"{both[0]} has no tensor model.visual. or mtp.*" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    split(both[1], tmp_path / "whole" / "actor", split_sizes())
    arguments[4] = str(tmp_path / "whole" / "actor")
    config = json.loads((both[1] / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "whole" / "actor" / "huggingface" / "config.json").write_text(json.dumps(config))
    assert main([*arguments, "--target_dir", str(tmp_path / "merged")]) == 2
    assert "whose files hold mtp.*" in capsys.readouterr().err
    assert main([*arguments, "--target_dir", str(tmp_path / "merged"), "--hf_model_path", str(both[1])]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config is None, not an object"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and False in text_config"),
    ],
)
def test_odd_configurations_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen3_5_text", **SIZES)
    store_as_released(path)
    config = json.loads((path / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(config)


def test_transformers_language_model_has_the_same_numbers(both: tuple[Path, Path]) -> None:
    """And the embedded engine finds each of its tensors by the name that a weight sync sends."""
    model = AutoModelForCausalLM.from_pretrained(both[1], dtype=torch.float32).requires_grad_(False)
    shape = ModelShape.from_hf(both[1])
    held = file_tensors(model, shape.model_type)
    with HFWeights(both[1]) as weights:
        assert held.keys() == family_of(shape).hf_shapes(shape.without_tower()).keys()
        assert [name for name in held if not torch.equal(held[name], weights.read(name)[:])] == []


def test_what_sglang_cannot_serve_while_it_is_trained_is_refused(both: tuple[Path, Path]) -> None:
    text, released = map(ModelShape.from_hf, both)

    def refusals(shape: ModelShape, device: str, every: int) -> list[str]:
        check = ENGINES["sglang"].trained_model_violations
        return list(check(RolloutConfig(), shape, section="rollout", device=device, verify_weights_every=every))

    assert [refusals(shape, device, 1) for shape in (text, released) for device in ("cpu", "cuda")] == [[]] * 4
    (of_layers,) = refusals(replace(text, linear_layers=(False, True)), "cpu", 0)
    assert "attends in others too (layer_types)" in of_layers
