"""One engine's model, optimizer and random state as a distributed checkpoint that any layout can load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from scalerl.errors import UserError

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine

DIST_CKPT = "dist_ckpt"
RNG = "rng"
# Optimizer state is stored by parameter, not by rank, so that tp, pp and dp may change; one key per layer, so that merge
# can read layer by layer.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": True}


class CheckpointMismatchError(UserError):
    """The checkpoint belongs to another model."""


def save_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Collective. Writes directory/dist_ckpt and directory/rng/rank_*.safetensors; the caller commits the directory."""
    directory = Path(directory)
    if dist.get_rank() == 0:
        (directory / DIST_CKPT).mkdir(parents=True)
        (directory / RNG).mkdir()
    dist.barrier()
    dist_checkpointing.save(_sharded_state(engine, is_loading=False), str(directory / DIST_CKPT))
    save_file(_rng_state(), directory / RNG / f"rank_{dist.get_rank()}.safetensors")
    dist.barrier()


def load_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Collective. Raises CheckpointMismatchError, before any weight changes, if the checkpoint is another model's."""
    directory = Path(directory)
    state = _sharded_state(engine, is_loading=True)
    _check_shapes(state["model"], directory / DIST_CKPT)
    loaded = dist_checkpointing.load(state, str(directory / DIST_CKPT))
    engine.model.load_state_dict(loaded["model"], strict=False)
    _keep_adam_step(engine.optimizer)
    engine.optimizer.load_state_dict(loaded["optimizer"])
    _unshare_adam_step(engine.optimizer)
    engine.num_updates = int(loaded["num_updates"])
    engine.schedule.num_steps = engine.num_updates + 1
    engine.schedule.step(0)
    rng_file = directory / RNG / f"rank_{dist.get_rank()}.safetensors"
    if len(list(rng_file.parent.glob("rank_*"))) == dist.get_world_size():
        _set_rng_state(load_file(rng_file))


def _sharded_state(engine: MegatronEngine, *, is_loading: bool) -> dict[str, Any]:
    model = engine.model.sharded_state_dict(metadata=_METADATA)
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA)
    return {"model": model, "optimizer": optimizer, "num_updates": engine.num_updates}


def _torch_adam_parts(optimizer: Any) -> list[Any]:
    """megatron's optimizers that wrap torch's Adam, the fallback where neither transformer-engine nor apex is installed."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)]


def _keep_adam_step(optimizer: Any) -> None:
    """Repairs megatron-core 0.16.1, which copies every entry of torch Adam's state, `step` too, from tensors that have no
    `step` (it was restored just before)."""
    for part in _torch_adam_parts(optimizer):
        if not hasattr(part, "_set_main_param_and_optimizer_states"):
            continue
        original = type(part)._set_main_param_and_optimizer_states

        def repaired(model_param: Any, tensors: dict, part: Any = part, original: Any = original) -> None:
            group, order = part.model_param_group_index_map[model_param]
            main_param = part.optimizer.param_groups[group]["params"][order]
            original(part, model_param, {"step": part.optimizer.state[main_param]["step"], **tensors})

        part._set_main_param_and_optimizer_states = repaired


def _unshare_adam_step(optimizer: Any) -> None:
    """Repairs megatron-core 0.16.1, which restores one `step` tensor for all parameters of torch's Adam: each parameter's
    update would then advance the step of all."""
    for part in _torch_adam_parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _check_shapes(model_state: dict[str, Any], directory: Path) -> None:
    stored = dist_checkpointing.load_tensors_metadata(str(directory))
    wrong = []
    for entry in _tensors(model_state):
        if entry.key not in stored:
            wrong.append(f"{entry.key}: not in the checkpoint")
        elif tuple(stored[entry.key].global_shape) != tuple(entry.global_shape) and not entry.allow_shape_mismatch:
            wrong.append(
                f"{entry.key}: {tuple(stored[entry.key].global_shape)}, the model has {tuple(entry.global_shape)}"
            )
    layers = {key.split("layers.")[1].split(".")[0] for key in stored if key.startswith("decoder.layers.")}
    expected = {
        key.key.split("layers.")[1].split(".")[0]
        for key in _tensors(model_state)
        if key.key.startswith("decoder.layers.")
    }
    if dist.get_world_size() == 1 and layers - expected:
        wrong.append(f"layers {sorted(layers - expected)} of the checkpoint are not in the model")
    if wrong:
        raise CheckpointMismatchError(
            f"{directory} is from another model; set trainer.resume_mode=disable or another trainer.default_local_dir. "
            + "; ".join(wrong[:8])
        )


def _tensors(state: Any) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = []
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, ShardedTensor):
            found.append(value)
        elif isinstance(value, ShardedTensorFactory):
            found.extend(_tensors(_as_container(value.build())))
        elif isinstance(value, dict | list):
            found.extend(_tensors(value))
    return found


def _as_container(built: Any) -> Any:
    return built if isinstance(built, dict | list) else [built]


def _rng_state() -> dict[str, torch.Tensor]:
    state = {f"tracker.{name}": value for name, value in get_cuda_rng_tracker().get_states().items()}
    state["torch"] = torch.get_rng_state()
    state["device"] = torch.cuda.get_rng_state()
    return {name: value.clone().contiguous() for name, value in state.items()}


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    prefix = "tracker."
    get_cuda_rng_tracker().set_states(
        {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    )
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
