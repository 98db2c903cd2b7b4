"""What torch's own FSDP1 and FSDP2 save on real ranks is merged into the very model, which transformers reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from scalerl.merge import main, merge_fsdp
from scalerl.merge.fsdp_shards import FsdpCheckpoint
from tests.dist.launch import run_ranks
from tests.lanes import full
from tests.tiny_models import FAMILIES, make_tiny_model

# Rows that no number of ranks divides.
VOCAB_SIZE = 301


@dataclass(frozen=True)
class Save:
    """How torch saves a model. kind: fully_shard, its columns, or FullyShardedDataParallel.

    mesh: sizes of its dimensions; FullyShardedDataParallel without one saves ShardedTensors.
    """

    model: str
    kind: str
    mesh: tuple[int, ...]
    directory: str
    is_critic: bool = False


def save_all(saves: Sequence[Save]) -> None:
    """On a rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        for save in saves:
            _save(save, dist.get_rank(), dist.get_world_size())
            dist.barrier()
    finally:
        dist.destroy_process_group()


def _save(save: Save, rank: int, world_size: int) -> None:
    if save.is_critic:
        model = AutoModelForTokenClassification.from_pretrained(save.model, num_labels=1)
        torch.manual_seed(0)
        with torch.no_grad():
            # Where platform.install replaced torch's factories, transformers leaves in a new head what its memory held.
            model.score.weight.normal_()
            model.score.bias.fill_(0.25)
    else:
        model = AutoModelForCausalLM.from_pretrained(save.model)
    directory = Path(save.directory)
    (directory / "huggingface").mkdir(parents=True, exist_ok=True)
    if rank == 0:
        model.config.save_pretrained(directory / "huggingface")
        AutoTokenizer.from_pretrained(save.model).save_pretrained(directory / "huggingface")
        if model.can_generate():
            model.generation_config.save_pretrained(directory / "huggingface")
        # What the ranks' files are to be.
        torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, directory / "whole.pt")
    state = _sharded_state(model, save)
    torch.save(state, directory / f"model_world_size_{world_size}_rank_{rank}.pt")


def _sharded_state(model: Any, save: Save) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
        fully_shard,
    )
    from torch.distributed.tensor import Shard

    names = ("ddp", "fsdp")[-len(save.mesh) :]
    mesh = init_device_mesh("cpu", save.mesh, mesh_dim_names=names) if save.mesh else None
    if save.kind.startswith("fully_shard"):
        by_columns = (lambda p: Shard(p.dim() - 1)) if save.kind.endswith("columns") else None
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=by_columns)
        fully_shard(model, mesh=mesh, shard_placement_fn=by_columns)
        return model.state_dict()
    hybrid = dict(sharding_strategy=ShardingStrategy.HYBRID_SHARD) if len(save.mesh) == 2 else {}
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=mesh, **hybrid)
    with FullyShardedDataParallel.state_dict_type(
        wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
    ):
        return wrapped.state_dict()


def tiny(path: Path, family: str, **changes: Any) -> str:
    sizes = dict(hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=VOCAB_SIZE)
    return str(make_tiny_model(path, family, **sizes, **changes))


def assert_merged(save: Save, model: str, target: Path) -> None:
    merge_fsdp(save.directory, target)
    original, merged = load_file(Path(model) / "model.safetensors"), load_file(target / "model.safetensors")
    assert merged.keys() == original.keys()
    for name, tensor in original.items():
        assert merged[name].dtype == tensor.dtype
        assert torch.equal(merged[name].view(torch.uint8), tensor.view(torch.uint8)), name
    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    whole = torch.load(Path(save.directory) / "whole.pt")
    assert loaded.state_dict().keys() == whole.keys()
    assert [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, whole[name])] == []
    assert AutoTokenizer.from_pretrained(target)("hi") == AutoTokenizer.from_pretrained(model)("hi")
    assert (target / "generation_config.json").is_file()


@pytest.mark.parametrize("families", [("qwen2", "mixtral"), full(tuple(FAMILIES))], ids=["two", "all"])
def test_two_ranks(tmp_path: Path, families: Sequence[str]) -> None:
    models = {family: tiny(tmp_path / family, family) for family in families}
    models["bfloat16"] = tiny(tmp_path / "bfloat16", "qwen3", dtype=torch.bfloat16)
    saves = [
        Save(model, kind, mesh, str(tmp_path / f"{name} {kind} {mesh}"))
        for name, model in models.items()
        for kind, mesh in (("fully_shard", (2,)), ("wrapper", ()))
    ]
    saves.append(Save(models["qwen2"], "fully_shard by columns", (2,), str(tmp_path / "columns")))
    run_ranks(2, save_all, saves)
    for save in saves:
        assert_merged(save, save.model, tmp_path / f"merged {Path(save.directory).name}")


def test_four_ranks_replicas_and_a_critic(tmp_path: Path) -> None:
    model = tiny(tmp_path / "qwen2", "qwen2", num_layers=1)
    places = [("fully_shard", (4,)), ("fully_shard", (2, 2)), ("wrapper", ()), ("wrapper", (4,)), ("wrapper", (2, 2))]
    saves = [Save(model, kind, mesh, str(tmp_path / f"{kind} {mesh}")) for kind, mesh in places]
    # Of its head, one row, three ranks have none.
    critic = Save(model, "fully_shard", (4,), str(tmp_path / "critic"), is_critic=True)
    run_ranks(4, save_all, [*saves, critic])
    for save in saves:
        assert_merged(save, model, tmp_path / f"merged {Path(save.directory).name}")
    stored = FsdpCheckpoint(saves[1].directory)
    ranks = {shard.rank for tensor in stored.tensors.values() for shard in tensor.shards}
    assert ranks == {0, 1}, "what two replicas hold is read once"

    merge_fsdp(critic.directory, tmp_path / "merged critic", dtype="float32")
    loaded, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    whole = torch.load(Path(critic.directory) / "whole.pt")
    assert [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, whole[name])] == []
    assert loaded.num_labels == 1 and loaded.score.bias.tolist() == [0.25]
    loaded.save_pretrained(tmp_path / "saved again")
    arguments = ["--local_dir", str(tmp_path / "merged critic"), "--test_hf_dir", str(tmp_path / "saved again")]
    assert main(["test", "--forward", *arguments]) == 0


OFFLINE = """
import sys
from scalerl.merge import main
code = main(sys.argv[1:])
assert not {"megatron", "ray", "sglang", "transformers", "mlflow"} & set(sys.modules)
import torch
assert not torch.distributed.is_initialized()
sys.exit(code)
"""


def test_neither_megatron_nor_ray_nor_a_process_group_is_needed(saved: Path, tmp_path: Path) -> None:
    arguments = ["merge", "--backend", "fsdp", "--local_dir", str(saved), "--target_dir", str(tmp_path / "merged")]
    done = subprocess.run([sys.executable, "-c", OFFLINE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()


class Malicious:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a run leaves it, of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    model = tiny(root / "model", "qwen3", num_layers=1)
    run_ranks(2, save_all, [Save(model, "fully_shard", (2,), str(root / "actor"))])
    return root / "actor"


@pytest.fixture
def actor(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "global_step_3" / "actor"))


def run(actor: Path, target: Path, *more: str) -> int:
    return main(["merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(target), *more])


@pytest.mark.parametrize("function", [os.system, eval, exec, subprocess.call, __import__, torch.load, torch.hub.load])
def test_a_file_that_would_run_code_is_refused(actor: Path, tmp_path: Path, capsys: Any, function: Any) -> None:
    mark, path = tmp_path / "ran", actor / "model_world_size_2_rank_1.pt"
    torch.save({"model.norm.weight": Malicious(function, f"touch {mark}")}, path)
    assert run(actor, tmp_path / "merged") == 2
    error = capsys.readouterr().err
    assert f"{path} is refused: " in error and f".{function.__name__} has no place in a file of tensors" in error
    assert not mark.exists() and not (tmp_path / "merged").exists()


def test_the_directory_of_its_configuration_gets_the_weights(actor: Path, tmp_path: Path, capsys: Any) -> None:
    """As the command that this field knows has it."""
    target = actor / "huggingface"
    before = {path.name for path in target.iterdir()}
    assert run(actor.parent, target, "--dtype", "bfloat16", "--max_shard_size", "60KB") == 0
    assert capsys.readouterr().out.startswith("merged 14 tensors, ")
    assert {path.name for path in target.iterdir()} > before
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    whole = torch.load(actor / "whole.pt")
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in whole.items())
    assert run(actor, target) == 2
    assert "has weights already" in capsys.readouterr().err


def test_what_is_missing_damaged_or_of_another_model_is_named(actor: Path, tmp_path: Path, capsys: Any) -> None:
    def refused(part: str) -> None:
        assert run(actor, tmp_path / "merged") == 2
        assert part in capsys.readouterr().err
        assert not list(tmp_path.glob("*merged*"))

    first, second = (actor / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    data = second.read_bytes()
    state = torch.load(actor / "whole.pt")
    places = [data.index(b"\x00" * 8, len(data) // 2), len(data) // 3, 2 * len(data) // 3]
    for at in places:
        second.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        # Between the parts of the file there is padding, which says nothing.
        if run(actor, tmp_path / "flipped", "--overwrite") == 2:
            assert str(second) in capsys.readouterr().err
        else:
            flipped = load_file(tmp_path / "flipped" / "model.safetensors")
            assert all(torch.equal(flipped[name], tensor) for name, tensor in state.items())
    second.write_bytes(data[: len(data) // 2])
    refused(f"{second}: is damaged, or not what torch.save has written")
    second.unlink()
    refused("has files of 1 of 2 ranks; missing: ranks 1")
    (actor / "model_world_size_1_rank_0.pt").write_bytes(data)
    refused("has files of runs with 1, 2 ranks")
    first.unlink()

    alone = actor / "model_world_size_1_rank_0.pt"
    torch.save(state, alone)
    assert run(actor, tmp_path / "alone") == 0
    torch.save(state | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2)}, alone)
    refused("adapters are not merged):\n  unexpected model.layers.0.self_attn.q_proj.lora_A.weight")
    state.pop("model.norm.weight")
    torch.save(state, alone)
    refused("(1 problems):\n  missing model.norm.weight")
    state["model.norm.weight"] = torch.zeros(7)
    torch.save(state, alone)
    refused("model.norm.weight has shape (7,), config.json says (32,)")
    torch.save(state, alone, _use_new_zipfile_serialization=False)
    refused("not what torch.save has written since 1.6")
    alone.unlink()
    refused("has no model_world_size_W_rank_R.pt")
