"""What is wrong with the tensors of a directory, and its other files; odd files: test_against_transformers.py."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.base.files import FETCHED, files_beside_weights
from scalerl.merge.convert import copy_beside
from scalerl.models import HFWeights, ModelShape, copy_beside_weights, family_of
from tests.tiny_models import make_tiny_model


def test_all_wrong_tensors_in_one_error(tmp_path):
    path = make_tiny_model(tmp_path / "m", "qwen3", hidden_size=16, num_layers=1, vocab_size=260, tied=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 16)
    tensors["model.layers.7.extra.weight"] = torch.zeros(1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    shape = ModelShape.from_hf(path)
    with HFWeights(path) as weights, pytest.raises(ValueError, match=r"4 problems") as caught:
        weights.check(family_of(shape), shape)
    for part in (
        "missing model.norm.weight",
        "missing model.layers.0.mlp.up_proj.weight",
        "unexpected model.layers.7.extra.weight",
        "model.layers.0.self_attn.q_proj.weight has shape (3, 16)",
    ):
        assert part in str(caught.value)


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        HFWeights(tmp_path / "nowhere")


def test_files_beside_the_weights(tmp_path):
    """One rule for a checkpoint's copy, a merge and what is fetched from the hub."""
    wanted = {"config.json", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja", "merges.txt", "modeling.py"}
    wanted |= {"README.md", "LICENSE", "LICENSE.txt", "NOTICE", "additional_chat_templates/tool_use.jinja"}
    weights = {"model.safetensors", "model.safetensors.index.json"}
    others = {"pytorch_model.bin", "LICENSE.bin", "optimizer.pt", ".gitattributes", "original/consolidated.00.pth"}
    hidden = {".cache/huggingface/x.json", "__pycache__/modeling.py", "additional_chat_templates/.x.jinja", ".x.json"}
    hidden |= {"additional_chat_templates/weights.safetensors"}
    model, merged, saved = tmp_path / "model", tmp_path / "merged", tmp_path / "saved"
    for name in wanted | weights | others | hidden:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).touch()
    assert {str(file) for file in files_beside_weights(model)} == wanted
    (model / "config.json").write_text('{"dtype": "float32"}')
    for directory, copy in ((saved, copy_beside_weights), (merged, partial(copy_beside, dtype=torch.float32))):
        directory.mkdir()
        copy(model, directory)
        assert {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} == wanted
    fetched = {name for name in wanted | weights | others if any(fnmatch(name, pattern) for pattern in FETCHED)}
    assert fetched == wanted | weights
