"""Opening Hugging Face weights: single file, shards, and every way a directory can be wrong."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.base.files import FETCHED, files_beside_weights
from scalerl.merge.convert import copy_beside
from scalerl.models import HFWeights, ModelShape, copy_beside_weights, family_of
from tests.tiny_models import make_tiny_model


@pytest.fixture
def model_dir(tmp_path) -> Path:
    return make_tiny_model(tmp_path / "m", "qwen3", hidden_size=16, num_layers=1, vocab_size=260, tied=False)


def check(path: Path) -> None:
    shape = ModelShape.from_hf(path)
    with HFWeights(path) as weights:
        weights.check(family_of(shape), shape)


def edit(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def split(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, path / file)
    index = {"weight_map": {n: f for f, members in parts.items() for n in members}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()


def test_all_wrong_tensors_in_one_error(model_dir):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 16)
        tensors["model.layers.7.extra.weight"] = torch.zeros(1)

    edit(model_dir, change)
    with pytest.raises(ValueError, match=r"4 problems") as caught:
        check(model_dir)
    for part in (
        "missing model.norm.weight",
        "missing model.layers.0.mlp.up_proj.weight",
        "unexpected model.layers.7.extra.weight",
        "model.layers.0.self_attn.q_proj.weight has shape (3, 16)",
    ):
        assert part in str(caught.value)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin.*refused.*save_pretrained"):
        HFWeights(tmp_path)


def test_directories_that_hold_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HFWeights(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        HFWeights(tmp_path / "nowhere")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors there, but no model.*index"):
        HFWeights(tmp_path)


def test_damaged_files_are_named(model_dir):
    data = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*download the model again"):
        HFWeights(model_dir)
    (model_dir / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        HFWeights(model_dir)


def test_an_index_that_names_absent_files(model_dir):
    split(model_dir)
    (model_dir / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not there: model-2\.safetensors"):
        HFWeights(model_dir)


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
