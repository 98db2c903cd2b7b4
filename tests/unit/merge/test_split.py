"""merge(split(model)) is the model, bit for bit, of every family on layouts of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.merge import main, merge
from scalerl.merge.split import split, split_sizes
from scalerl.models import ModelShape, read_config
from tests.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model, store_as_fp8

DENSE = [split_sizes(), split_sizes(tp=2, pp=2), split_sizes(pp=2, vpp=2, cp=2)]
MIXTURE = [split_sizes(tp=2, ep=2, etp=1), split_sizes(pp=2, ep=4, etp=2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    # A vocabulary that tp ranks pad differently.
    sizes = dict(num_layers=4, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=300)
    return {family: make_tiny_model(root / family, family, **sizes) for family in FAMILIES}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_merge_undoes_split(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    layouts = [*DENSE, *(MIXTURE if family in WITH_EXPERTS else [])]
    for number, sizes in enumerate(layouts):
        checkpoint = tmp_path / f"split{number}"
        assert split(models[family], checkpoint, sizes) == sizes.world_size
        assert len(list((checkpoint / "dist_ckpt").glob("*.distcp"))) == sizes.world_size, "every rank has its share"
        merge(checkpoint, tmp_path / f"merged{number}")
        assert_same(tmp_path / f"merged{number}", models[family])


def test_a_model_stored_as_fp8_is_merged_as_its_dtype(tmp_path: Path) -> None:
    """And a YaRN that config.json asks for stays there."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    path = make_tiny_model(
        tmp_path / "m",
        "qwen3",
        hidden_size=192,
        dtype=torch.bfloat16,
        rope_parameters=yarn,
        max_position_embeddings=2048,
    )
    config = read_config(path)
    meant = store_as_fp8(path)
    split(path, tmp_path / "split", split_sizes(tp=2))
    assert merge(tmp_path / "split", tmp_path / "merged").dtype == "bfloat16"
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == meant.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, meant[name].bfloat16()), name
    assert read_config(tmp_path / "merged") == config and config["rope_parameters"] == yarn


def test_ranks_have_what_their_layout_says(models: dict[str, Path], tmp_path: Path) -> None:
    split(models["qwen3_moe"], tmp_path / "split", split_sizes(tp=2, pp=2, vpp=2, ep=2, etp=1))
    with DistCheckpoint(tmp_path / "split" / "dist_ckpt") as stored:

        def ranks(key: str) -> dict[str, set[tuple[int, ...]]]:
            offsets_of_file: dict[str, set[tuple[int, ...]]] = {}
            for piece in stored.pieces(f"model.{key}"):
                offsets_of_file.setdefault(piece.file, set()).add(piece.offsets)
            return offsets_of_file

        # Chunks of one layer: stage 0 has layers 0 and 2.
        of_layer = [set(ranks(f"decoder.layers.{i}.self_attention.linear_proj.weight")) for i in range(4)]
        assert of_layer == [{f"__{r}_0.distcp" for r in stage} for stage in ((0, 1), (2, 3), (0, 1), (2, 3))]
        gate_up = ranks("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
        assert set(gate_up) == {"__3_0.distcp"}, "the second of two that share the experts has the last ones"
        assert ranks("decoder.layers.0.self_attention.linear_proj.weight")["__1_0.distcp"] == {(0, 16)}
        assert set(ranks("output_layer.weight")) == {"__2_0.distcp", "__3_0.distcp"}
        assert stored.shape("model.output_layer.weight") == (384, 32), "padded for two tensor-parallel ranks"


def test_command_line(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = models["llama"], tmp_path / "split"
    assert main(["split", str(model), str(target), "--tp", "2", "--pp", "4"]) == 0
    assert capsys.readouterr().out == f"split over 8 ranks: {target}\n"
    assert {path.name for path in target.iterdir()} == {"dist_ckpt", "huggingface"}
    assert ModelShape.from_hf(target / "huggingface") == ModelShape.from_hf(model)
    assert main(["split", str(model), str(target)]) == 2
    assert "is there already" in capsys.readouterr().err
    for options, words in (
        (["--tp", "3"], "is not divisible by tp_size 3"),
        (["--pp", "3"], "must divide 4 layers"),
        (["--vpp", "2"], "--vpp 2 needs --pp above 1"),
        (["--ep", "2"], "--ep 2 must divide 0 experts"),
        (["--cp", "0"], "--cp 0 must be at least 1"),
    ):
        assert main(["split", str(model), str(tmp_path / "other"), *options]) == 2
        assert words in capsys.readouterr().err
        assert not list(tmp_path.glob("*other*"))
