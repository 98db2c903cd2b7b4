"""HF -> joined Megatron tensors -> torch_dist checkpoint -> merge -> HF, byte for byte; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import scalerl
from scalerl.checkpoint import store
from scalerl.checkpoint.pieces import Piece, write_file, write_index
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.merge import convert, main, merge
from scalerl.merge.command import parse_bytes
from scalerl.models import CHECKPOINT_MODEL_PREFIX, HFWeights, ModelShape, family_of
from tests.lanes import full
from tests.tiny_models import WITH_EXPERTS, make_tiny_model

REPO = Path(next(iter(scalerl.__path__))).parent
MODELS = [(f, tied) for f in ("qwen3", "qwen2", "llama") for tied in (True, False)]
MODELS += [(f, False) for f in ("mistral", *WITH_EXPERTS)]


def tiny(path: Path, family: str = "qwen3", tied: bool = False, **sizes) -> Path:
    return make_tiny_model(
        path, family, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=300, tied=tied, **sizes
    )


def joined_tensors(hf_dir: Path, tp_size: int = 2) -> dict[str, torch.Tensor]:
    shape = ModelShape.from_hf(hf_dir)
    with HFWeights(hf_dir) as weights:
        return {
            CHECKPOINT_MODEL_PREFIX + p.name: p.join(
                [p.shard(weights.read, shape, r, tp_size) for r in range(tp_size)], shape
            )
            for p in family_of(shape).params(shape)
        }


def write_checkpoint(root: Path, hf_dir: Path, tensors: dict[str, torch.Tensor], *, complete: bool = True) -> Path:
    """global_step_7 as a training run leaves it; returns its actor/."""
    actor = root / "global_step_7" / "actor"
    optimizer = {f"optimizer.state.exp_avg.{k}": torch.zeros(2) for k in list(tensors)[:2]}
    dcp.save(
        {**tensors, **optimizer, "rng_state": [1, 2]},
        storage_writer=dcp.FileSystemWriter(actor / "dist_ckpt", thread_count=2),
        no_dist=True,
    )
    (actor / "huggingface").mkdir()
    for file in hf_dir.iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            (actor / "huggingface" / file.name).write_bytes(file.read_bytes())
    if complete:
        (actor.parent / "COMPLETE").write_text('{"files": {}}')
    return actor


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return tiny(tmp_path / "hf")


@pytest.fixture
def actor(tmp_path, hf_dir) -> Path:
    return write_checkpoint(tmp_path / "run", hf_dir, joined_tensors(hf_dir))


def run(actor: Path, target: Path, *more: str) -> int:
    return main(["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(target), *more])


@pytest.mark.shows("merge", layout="no ranks")
@pytest.mark.parametrize(("family", "tied"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_model_is_the_original_byte_for_byte(tmp_path, family, tied, dtype):
    hf_dir = tiny(tmp_path / "hf", family, tied, dtype=dtype)
    actor = write_checkpoint(tmp_path, hf_dir, joined_tensors(hf_dir))
    target = tmp_path / "merged"
    summary = merge(actor, target)
    original, merged = load_file(hf_dir / "model.safetensors"), load_file(target / "model.safetensors")
    assert merged.keys() == original.keys()
    for name, tensor in original.items():
        assert merged[name].dtype == tensor.dtype
        assert torch.equal(merged[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert summary.num_tensors == len(original)
    assert summary.num_bytes == sum(t.nbytes for t in original.values())
    others = {p.name for p in hf_dir.iterdir()} - {"model.safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= others
    for name in others:
        assert (target / name).read_bytes() == (hf_dir / name).read_bytes()
    assert {p.name for p in target.iterdir()} == others | {"model.safetensors"}


@pytest.mark.shows("merge", layout="no ranks")
@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_transformers_computes_the_same_logits(tmp_path, family, tied):
    hf_dir = tiny(tmp_path / "hf", family, tied)
    target = tmp_path / "merged"
    merge(write_checkpoint(tmp_path, hf_dir, joined_tensors(hf_dir)), target, max_shard_bytes=40_000)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(hf_dir)(ids).logits
        model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert torch.equal(model(ids).logits, expected)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (
        AutoTokenizer.from_pretrained(target)("hi")["input_ids"]
        == AutoTokenizer.from_pretrained(hf_dir)("hi")["input_ids"]
    )


def test_several_files_with_an_index_in_bytes(tmp_path, hf_dir, actor):
    target = tmp_path / "merged"
    summary = merge(actor, target, max_shard_bytes=40_000)
    files = sorted(p.name for p in target.glob("*.safetensors"))
    assert len(files) == summary.num_files > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    original = load_file(hf_dir / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in original.values())
    tensors = {}
    for file in files:
        part = load_file(target / file)
        assert all(index["weight_map"][n] == file for n in part)
        biggest_group = 3 * 300 * 32 * 4
        assert sum(t.nbytes for t in part.values()) <= max(40_000, biggest_group)
        tensors |= part
    assert tensors.keys() == index["weight_map"].keys() == original.keys()
    assert all(torch.equal(tensors[n], original[n]) for n in original)


@pytest.mark.parametrize("prefix", [CHECKPOINT_MODEL_PREFIX, ""])
def test_keys_with_and_without_the_model_prefix(tmp_path, hf_dir, prefix):
    tensors = {prefix + k.removeprefix(CHECKPOINT_MODEL_PREFIX): v for k, v in joined_tensors(hf_dir).items()}
    tensors[prefix + "decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(1)
    merge(write_checkpoint(tmp_path, hf_dir, tensors), tmp_path / "merged")
    original, merged = load_file(hf_dir / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(merged[n], original[n]) for n in original)


def test_dtype_is_converted_and_written_to_the_config(tmp_path, hf_dir, actor):
    target = tmp_path / "merged"
    assert run(actor, target, "--dtype", "bfloat16") == 0
    merged = load_file(target / "model.safetensors")
    assert all(torch.equal(merged[n], t.bfloat16()) for n, t in load_file(hf_dir / "model.safetensors").items())
    config, before = (json.loads((d / "config.json").read_text()) for d in (target, hf_dir))
    assert config == before | {"dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_numbers_that_float16_cannot_hold_are_refused_with_their_tensor(tmp_path, hf_dir, capsys, stored):
    """They would be infinite; what fits is converted as torch does."""
    tensors = {name: tensor.to(stored) for name, tensor in joined_tensors(hf_dir).items()}
    target = tmp_path / "merged"
    assert run(write_checkpoint(tmp_path / "fits", hf_dir, tensors), target, "--dtype", "float16") == 0
    merged = load_file(target / "model.safetensors")
    assert all(torch.equal(merged[n], t.to(stored).half()) for n, t in load_file(hf_dir / "model.safetensors").items())
    key = "model.decoder.layers.1.mlp.linear_fc2.weight"
    tensors[key] = tensors[key].clone()
    tensors[key][-1, -1] = -7e4
    actor = write_checkpoint(tmp_path / "large", hf_dir, tensors)
    assert run(actor, target, "--overwrite", "--dtype", "float16") == 2
    assert f"{key} has numbers that are too large for float16" in capsys.readouterr().err
    assert load_file(target / "model.safetensors").keys() == merged.keys()
    assert run(actor, target, "--overwrite", "--dtype", "float32") == 0


def test_numbers_of_an_fsdp_run_that_float16_cannot_hold_are_refused_too(tmp_path, hf_dir, capsys):
    state, name = load_file(hf_dir / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    run_dir, target = tmp_path / "fsdp", tmp_path / "merged"
    shutil.copytree(hf_dir, run_dir / "huggingface")
    arguments = ["merge", "--backend", "fsdp", "--local_dir", str(run_dir), "--target_dir", str(target)]
    for largest, code in ((7e4, 2), (6e4, 0)):
        state[name][0, 0] = largest
        torch.save(state, run_dir / "model_world_size_1_rank_0.pt")
        assert main([*arguments, "--dtype", "float16"]) == code
        assert target.exists() == (code == 0)
    assert f"{name} has numbers that are too large for float16" in capsys.readouterr().err


def test_mixed_stored_dtypes_need_a_choice(tmp_path, hf_dir, capsys):
    tensors = joined_tensors(hf_dir)
    tensors["model.decoder.final_layernorm.weight"] = tensors["model.decoder.final_layernorm.weight"].bfloat16()
    actor = write_checkpoint(tmp_path, hf_dir, tensors)
    assert run(actor, tmp_path / "merged") == 2
    assert "several dtypes (torch.bfloat16, torch.float32); choose one with --dtype" in capsys.readouterr().err
    assert run(actor, tmp_path / "merged", "--dtype", "float32") == 0


def test_missing_extra_and_misshapen_tensors_in_one_error(tmp_path, hf_dir, capsys):
    tensors = joined_tensors(hf_dir)
    del tensors["model.decoder.final_layernorm.weight"]
    tensors["model.decoder.layers.9.mlp.linear_fc2.weight"] = torch.zeros(2)
    tensors["model.decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(2, 3)
    tensors["model.embedding.word_embeddings.weight"] = torch.zeros(299, 32)
    assert run(write_checkpoint(tmp_path, hf_dir, tensors), tmp_path / "merged") == 2
    error = capsys.readouterr().err
    assert "4 problems" in error
    for part in (
        "missing model.decoder.final_layernorm.weight",
        "unexpected model.decoder.layers.9.mlp.linear_fc2.weight",
        "decoder.layers.1.mlp.linear_fc2.weight: shape (2, 3), should be (32, 64)",
        "embedding.word_embeddings.weight: shape (299, 32), should be (300, 32) or more rows",
    ):
        assert part in error
    assert "optimizer" not in error
    assert [p.name for p in tmp_path.iterdir() if "merged" in p.name] == []


def test_a_cut_or_missing_data_file_is_named(tmp_path, actor, capsys):
    file = max((actor / "dist_ckpt").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert run(actor, tmp_path / "merged") == 2
    assert f"file {file.name} is cut short" in capsys.readouterr().err
    file.unlink()
    assert run(actor, tmp_path / "merged") == 2
    assert f"file {file.name} is missing" in capsys.readouterr().err
    file.write_bytes(b"\0" * len(data))
    assert run(actor, tmp_path / "merged") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))


def test_a_tensor_with_a_piece_missing_is_refused(actor):
    path = actor / "dist_ckpt" / ".metadata"
    content = pickle.loads(path.read_bytes())
    key = "model.decoder.final_layernorm.weight"
    (chunk,) = content.state_dict_metadata[key].chunks
    chunk.sizes = torch.Size([16])
    path.write_bytes(pickle.dumps(content))
    assert DistCheckpoint(actor / "dist_ckpt").problem(key) == f"{key}: saved pieces hold 16 of 32 elements"


def test_a_file_name_that_leaves_the_checkpoint_is_refused(actor):
    path = actor / "dist_ckpt" / ".metadata"
    content = pickle.loads(path.read_bytes())
    key = "model.decoder.final_layernorm.weight"
    for index, stored in content.storage_data.items():
        if index.fqn == key:
            stored.relative_path = "../../secret"
    path.write_bytes(pickle.dumps(content))
    assert "leaves the checkpoint directory" in DistCheckpoint(actor / "dist_ckpt").problem(key)


class Malicious:
    def __init__(self, function, *args) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, exec, subprocess.call, __import__, torch.load, getattr])
def test_metadata_that_would_run_code_is_refused(tmp_path, actor, capsys, function):
    mark = tmp_path / "ran"
    path = actor / "dist_ckpt" / ".metadata"
    content = pickle.loads(path.read_bytes())
    content.planner_data = Malicious(function, f"touch {mark}")
    path.write_bytes(pickle.dumps(content))
    assert run(actor, tmp_path / "merged") == 2
    assert f"{path} is refused: {pickle.whichmodule(function, function.__name__)}" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"nonsense", pickle.dumps({"a": 1})])
def test_metadata_that_is_none_is_refused(tmp_path, actor, capsys, content):
    (actor / "dist_ckpt" / ".metadata").write_bytes(content)
    assert run(actor, tmp_path / "merged") == 2
    assert "error: " in capsys.readouterr().err


def test_target_is_whole_or_not_there(tmp_path, hf_dir, actor, capsys):
    target = tmp_path / "merged"
    target.mkdir()
    assert run(actor, target) == 0
    (target / "stale.txt").write_text("x")
    assert run(actor, target) == 2
    assert "is not empty; give another, or --overwrite" in capsys.readouterr().err
    assert run(actor, target, "--overwrite") == 0
    assert not (target / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "merged", "run"]


def test_overwrite_replaces_models_only_and_never_the_checkpoint(tmp_path, actor, capsys):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    assert run(actor, precious, "--overwrite") == 2
    assert "--overwrite replaces models only" in capsys.readouterr().err
    assert (precious / "thesis.tex").exists()
    for target in (actor, actor / "huggingface", actor.parent, actor.parent.parent, actor / "new"):
        assert run(actor, target, "--overwrite") == 2
        assert "overlaps the checkpoint" in capsys.readouterr().err
    # Beside the model: the run's rotation would remove it.
    for target in (actor.parent / "merged", actor.parent / "hf" / "merged"):
        assert run(actor, target) == 2
        assert f"is in the checkpoint {actor.parent}, and would be removed with it" in capsys.readouterr().err
        assert not target.exists()


def test_where_the_checkpoint_is(tmp_path, hf_dir, actor, capsys):
    assert run(actor.parent, tmp_path / "a") == 0
    assert run(actor.parent.parent, tmp_path / "b") == 2
    assert f"did you mean {actor}?" in capsys.readouterr().err
    assert run(tmp_path / "nowhere", tmp_path / "b") == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    (actor / "huggingface" / "config.json").unlink()
    assert run(actor, tmp_path / "b") == 2
    assert "huggingface has no config.json" in capsys.readouterr().err
    (actor.parent / "COMPLETE").unlink()
    assert run(actor, tmp_path / "b") == 2
    assert "global_step_7 has no COMPLETE file" in capsys.readouterr().err


def test_command_line_without_megatron_ray_or_a_device(tmp_path, actor):
    # `python -m scalerl.merge`, and what it has imported by its end.
    code = (
        "import atexit, runpy, sys, torch; "
        "bad = {'megatron', 'ray', 'sglang', 'transformers', 'mlflow'}; "
        "atexit.register(lambda: print(bad & sys.modules.keys(), torch.distributed.is_initialized())); "
        "runpy.run_module('scalerl.merge', run_name='__main__', alter_sys=True)"
    )
    target = tmp_path / "merged"
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(target)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said, imported = done.stdout.splitlines()
    assert said.startswith("merged 25 tensors, ") and said.endswith(str(target))
    assert imported == "set() False"
    assert "Warning" not in done.stderr
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1GiB", 2**30), ("7", 7)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "0", "1.5GB"])
def test_sizes_that_are_none(text, capsys):
    with pytest.raises(SystemExit):
        main(["merge", "--backend", "megatron", "--local_dir", "a", "--target_dir", "b", f"--max_shard_size={text}"])
    assert "is not a size such as 5GB" in capsys.readouterr().err


def write_pieces(root: Path, hf_dir: Path, tensors: dict[str, torch.Tensor], num_ranks: int = 2) -> Path:
    """As `write_checkpoint`, in the form that scalerl's ranks write; rows and columns are split over them in turn."""
    actor = root / "global_step_7" / "actor"
    (actor / "dist_ckpt").mkdir(parents=True)
    files = []
    for rank in range(num_ranks):
        mine = []
        for number, (key, tensor) in enumerate(tensors.items()):
            dim = number % tensor.dim()
            part = tensor.tensor_split(num_ranks, dim=dim)[rank]
            before = sum(p.shape[dim] for p in tensor.tensor_split(num_ranks, dim=dim)[:rank])
            offsets = tuple(before if d == dim else 0 for d in range(tensor.dim()))
            mine.append(Piece(key, tuple(tensor.shape), offsets, part.contiguous()))
        files.append(write_file(actor / "dist_ckpt" / f"__{rank}_0.distcp", mine))
    write_index(actor / "dist_ckpt", files, {"num_updates": 1})
    shutil.copytree(hf_dir, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors*"))
    tmp = store.begin_save(root, 7)
    actor.parent.rename(tmp / "moved")
    (tmp / "moved" / "actor").rename(tmp / "actor")
    (tmp / "moved").rmdir()
    return store.commit(tmp, root, 7) / "actor"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_split_pieces_of_any_kind_are_put_in_their_places(tmp_path, family, dtype):
    hf_dir = tiny(tmp_path / "hf", family)
    actor = write_pieces(tmp_path / "run", hf_dir, joined_tensors(hf_dir), 3)
    assert run(actor, tmp_path / "merged", "--dtype", dtype, "--workers", "3") == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in load_file(hf_dir / "model.safetensors").items():
        to = torch.float32 if name.endswith("e_score_correction_bias") else getattr(torch, dtype)
        assert merged[name].dtype == to
        assert torch.equal(merged[name], tensor.to(to)), name


def test_a_flipped_byte_of_any_file_is_named_and_nothing_is_written(tmp_path, hf_dir, capsys):
    actor = write_pieces(tmp_path / "run", hf_dir, joined_tensors(hf_dir))
    with DistCheckpoint(actor / "dist_ckpt") as stored:
        key = "model.decoder.layers.1.mlp.linear_fc2.weight"
        piece = next(iter(stored.pieces(key)))
    places = [
        (actor / "dist_ckpt" / piece.file, piece.start + at) for at in (5, piece.payload + 3, piece.num_bytes - 1)
    ]
    places += [(file, file.stat().st_size // 2) for file in (actor / "huggingface").iterdir()]
    places += [(actor / "dist_ckpt" / name, 100) for name in (".metadata", "pieces.json", "common.pt")]
    for file, at in places:
        data = bytearray(file.read_bytes())
        data[at] ^= 16
        file.write_bytes(data)
        assert run(actor, tmp_path / "merged") == 2
        error = capsys.readouterr().err
        assert file.name in error and ("damaged" in error or f"tensor {key} at [" in error)
        assert not list(tmp_path.glob("*merged*"))
        data[at] ^= 16
        file.write_bytes(data)
    # Under another name its files are compared as well.
    renamed = actor.parent.rename(tmp_path / "run" / "the_best")
    file = renamed / "actor" / "huggingface" / "generation_config.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"{", b"[", 1))
    assert run(renamed / "actor", tmp_path / "merged") == 2
    assert "the_best is damaged: file actor/huggingface/generation_config.json" in capsys.readouterr().err
    file.write_bytes(content)
    assert run(renamed / "actor", tmp_path / "merged") == 0


BIG = dict(
    model_type="qwen2",
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=8192,
    intermediate_size=6144,
    num_hidden_layers=5,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
MEASURE = """
import re, sys
from pathlib import Path
from scalerl.merge import main
def resident(field):
    return int(re.search(rf"^{field}:\\s*(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
code = main(sys.argv[1:])
print("peak", resident("VmHWM") - before)
sys.exit(code)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not reset the peak")
@pytest.mark.parametrize("dtype", ["bfloat16", full("float32")])
def test_memory_is_that_of_a_few_rows(tmp_path, dtype):
    """Of everything resident, mapped files included; the model is several times as large."""
    hf_dir = tmp_path / "hf"
    hf_dir.mkdir()
    (hf_dir / "config.json").write_text(json.dumps(BIG))
    shape = ModelShape.from_hf(hf_dir)
    stored = {
        CHECKPOINT_MODEL_PREFIX + p.name: torch.ones(p.joined_shape(shape), dtype=torch.bfloat16)
        for p in family_of(shape).params(shape)
    }
    model_bytes = sum(tensor.nbytes for tensor in stored.values())
    actor = write_pieces(tmp_path / "run", hf_dir, stored)
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(tmp_path / "merged")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments, "--dtype", dtype, "--workers", "2"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("peak ")[1])
    bound = 64 * 2**20
    assert model_bytes > 3 * bound, "too small to tell"
    assert peak <= bound


def test_compared_with_another_model(tmp_path, hf_dir, actor, capsys):
    assert run(actor, tmp_path / "merged") == 0
    test = ["test", "--local_dir", str(tmp_path / "merged"), "--test_hf_dir"]
    assert main([*test, str(hf_dir), "--forward"]) == 0
    said = capsys.readouterr().out
    assert "all tensors are the same" in said and "largest difference of the logits: 0" in said
    other = tiny(tmp_path / "other", seed=1)
    assert main([*test, str(other), "--forward"]) == 1
    said = capsys.readouterr().out
    assert "model.embed_tokens.weight: differs by up to" in said and "tensors differ" in said
    assert main([*test, str(tiny(tmp_path / "tied", tied=True))]) == 1
    assert "lm_head.weight: only in" in capsys.readouterr().out


def save_critic(directory: Path, hf_dir: Path, model_class: Any, seed: int) -> None:
    """A value model, of token classification with a bias that is not 0."""
    torch.manual_seed(seed)
    model = model_class.from_pretrained(hf_dir, num_labels=1)
    if model_class is AutoModelForTokenClassification:
        torch.nn.init.ones_(model.score.bias)
    model.save_pretrained(directory)


@pytest.mark.parametrize("model_class", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_critics_are_compared_by_their_values(tmp_path, hf_dir, capsys, model_class):
    """By their heads, not by a language model's that transformers would make up."""
    save_critic(tmp_path / "critic", hf_dir, model_class, 0)
    shutil.copytree(tmp_path / "critic", tmp_path / "same")
    save_critic(tmp_path / "other", hf_dir, model_class, 1)
    test = ["test", "--forward", "--local_dir", str(tmp_path / "critic"), "--test_hf_dir"]
    assert main([*test, str(tmp_path / "same")]) == 0
    assert "largest difference of the logits: 0\n" in capsys.readouterr().out
    assert main([*test, str(tmp_path / "other")]) == 1
    said = capsys.readouterr().out
    assert "score.weight: differs by" in said and "logits: 0\n" not in said
    assert main([*test, str(hf_dir)]) == 2
    assert "one is a language model" in capsys.readouterr().err


def test_a_bias_of_a_critic_counts(tmp_path, hf_dir, capsys):
    for name, bias in (("critic", 1.0), ("other", 2.0)):
        save_critic(tmp_path / name, hf_dir, AutoModelForTokenClassification, 0)
        file = tmp_path / name / "model.safetensors"
        save_file(load_file(file) | {"score.bias": torch.tensor([bias])}, file, metadata={"format": "pt"})
    arguments = ["--forward", "--local_dir", str(tmp_path / "critic"), "--test_hf_dir", str(tmp_path / "other")]
    assert main(["test", *arguments]) == 1
    said = capsys.readouterr().out
    assert "score.bias: differs by up to 1\n" in said and "1 tensors differ" in said
    assert "largest difference of the logits: 1\n" in said


def test_a_checkpoint_that_rotation_removes_meanwhile(tmp_path, actor, capsys, monkeypatch):
    """After its files were opened and read: those beside the weights are copied last."""
    write = convert._write_tensors

    def write_and_lose(*args: Any, **kwargs: Any) -> Any:
        written = write(*args, **kwargs)
        actor.parent.rename(actor.parent.with_name("global_step_7.deleting-0"))
        return written

    monkeypatch.setattr(convert, "_write_tensors", write_and_lose)
    assert run(actor, tmp_path / "merged") == 2
    said = capsys.readouterr().err
    assert f"error: {actor} was removed while it was read" in said and "trainer.ckpt_every_to_keep" in said
    assert not (tmp_path / "merged").exists()


class Hub(BaseHTTPRequestHandler):
    """A hub that lets nobody make a repository."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        self.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.send_error(403)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.parametrize("answers", [True, full(False)])
def test_an_upload_reaches_the_network_with_a_whole_model(tmp_path, actor, capsys, answers):
    """A hub that refuses, or is not there; a name that none can have is refused before anything is written."""
    assert run(actor, tmp_path / "merged", "--hf_upload_path", "not/a/name") == 2
    assert "--hf_upload_path 'not/a/name' is no name of a repository" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    code = "import sys; from scalerl.merge import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(actor), "--target_dir", str(tmp_path / "merged")]
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        if answers:
            threading.Thread(target=hub.serve_forever, daemon=True).start()
        else:
            hub.server_close()
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--hf_upload_path", "somebody/model", "--private"],
            cwd=REPO,
            env=os.environ
            | {
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
                "HF_TOKEN": "none",
                # Which would raise before a socket is opened.
                "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "*",
                "no_proxy": "*",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        if answers:
            hub.shutdown()
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("merged 25 tensors")
    assert "was merged but could not be uploaded to somebody/model: " in done.stderr
    assert ("403" if answers else "Connection refused") in done.stderr
    assert f"hf upload somebody/model {tmp_path / 'merged'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    if answers:
        ((path, wanted),) = Hub.asked
        assert path == "/api/repos/create" and wanted["visibility"] == "private"
        assert (wanted["organization"], wanted["name"]) == ("somebody", "model")
