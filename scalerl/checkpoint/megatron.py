"""One engine's model, optimizer and random state as a distributed checkpoint that any layout can load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import load_tensors_metadata
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from scalerl.errors import UserError
from scalerl.families import ModelShape, Param, padded_vocab_size

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine

DIST_CKPT = "dist_ckpt"
RNG = "rng"
# First parts of the model's own keys; the optimizer's begin with `optimizer.`.
_MODEL_ROOTS = ("embedding.", "decoder.", "output_layer.")
# What of an engine a checkpoint holds.
_STATE = ("params", "optimizer")
# Tensors that an error names.
_MAX_SHOWN = 8
# Optimizer state is stored by parameter, not by rank, so that tp, pp and dp may change; one key per layer, so that
# merge can read layer by layer.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "non_homogeneous_layers": True,
    # The optimizers of experts and of the rest write under names of their own anyway.
    "chained_optim_avoid_prefix": True,
}


class CheckpointMismatchError(UserError):
    """The checkpoint belongs to another model."""


def save_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Collective. Writes directory/dist_ckpt and directory/rng/rank_*.safetensors; the caller commits the directory."""
    directory = Path(directory)
    engine.require_on_device(*_STATE, work="saving a checkpoint")
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
    engine.require_on_device(*_STATE, work="loading a checkpoint")
    _check_model(engine, directory / DIST_CKPT)
    state = _sharded_state(engine, is_loading=True)
    loaded: Any = dist_checkpointing.load(state, str(directory / DIST_CKPT))
    for index, chunk in enumerate(engine.chunks):
        chunk.load_state_dict(loaded["model"][_chunk(index)], strict=False)
    _keep_adam_step(engine.optimizer)
    engine.optimizer.load_state_dict(loaded["optimizer"])
    _unshare_adam_step(engine.optimizer)
    engine.num_updates = int(loaded["num_updates"])
    engine.schedule.num_steps = engine.num_updates + 1
    engine.schedule.step(0)
    rng_file = directory / RNG / f"rank_{dist.get_rank()}.safetensors"
    if len(list(rng_file.parent.glob("rank_*"))) == dist.get_world_size():
        _set_rng_state(load_file(rng_file))


def _chunk(index: int) -> str:
    return f"model{index}"


def _sharded_state(engine: MegatronEngine, *, is_loading: bool) -> dict[str, Any]:
    _keep_bucket_padding(engine.optimizer)
    _give_empty_parts_a_step(engine)
    # A copy: megatron adds this layout's process group to it.
    metadata = dict(_METADATA)
    model = {_chunk(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(engine.chunks)}
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "num_updates": engine.num_updates}


def _keep_bucket_padding(optimizer: Any) -> None:
    """Repairs megatron-core 0.16.1, which gathers optimizer state without the padding between buckets, then cuts it at
    positions that count the padding: tied embeddings (a bucket of their own with pp) would be saved shifted."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not hasattr(part, "get_parameter_state_dp_zero"):
            continue
        original = type(part).get_parameter_state_dp_zero

        def repaired(*, part: Any = part, original: Any = original, **kwargs: Any) -> dict[Any, Any]:
            state = original(part, **kwargs)
            for index, buffer in enumerate(part.buffers):
                for tensors in state[index].values():
                    tensors.update(
                        {key: _padded(value, buffer) for key, value in tensors.items() if torch.is_tensor(value)}
                    )
            return state

        part.get_parameter_state_dp_zero = repaired


def _padded(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    """flat: the buffer's buckets end to end -> each bucket at its offset in the buffer."""
    padded, start = flat.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return padded


def _give_empty_parts_a_step(engine: MegatronEngine) -> None:
    """Repairs megatron-core 0.16.1, which finds the number of updates in the state of any parameter: the optimizer of
    the experts has none on a pipeline stage without a mixture."""
    for part in _torch_adam_parts(engine.optimizer):
        state = part.optimizer.state
        if not any(torch.is_tensor(key) for key in state):
            state["no parameter"] = {"step": torch.tensor(float(engine.num_updates))}


def _torch_adam_parts(optimizer: Any) -> list[Any]:
    """megatron's optimizers that wrap torch's Adam, its fallback without transformer-engine and apex."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)]


def _keep_adam_step(optimizer: Any) -> None:
    """Repairs megatron-core 0.16.1, which copies every entry of torch Adam's state, `step` too, from tensors that
    have no `step` (it was restored just before)."""
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
    """Repairs megatron-core 0.16.1, which restores one `step` tensor for all parameters of torch's Adam: each
    parameter's update would then advance the step of all."""
    for part in _torch_adam_parts(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _check_model(engine: MegatronEngine, directory: Path) -> None:
    """Every rank compares the whole model, not its part: all refuse together, none waits in a collective."""
    stored = {key: tuple(entry.global_shape) for key, entry in load_tensors_metadata(str(directory)).items()}
    params = {param.name: param for param in engine.family.params(engine.shape)}
    wrong = []
    for name, param in params.items():
        shapes = _joined_shapes(param, engine.shape)
        if name not in stored:
            wrong.append(f"{name}: not in the checkpoint")
        elif stored[name] not in shapes:
            wrong.append(f"{name}: {stored[name]}, the model has {' or '.join(map(str, shapes))}")
    wrong += [
        f"{key}: not in the model" for key in sorted(stored) if key.startswith(_MODEL_ROOTS) and key not in params
    ]
    if wrong:
        more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        raise CheckpointMismatchError(
            f"{directory} is from another model; set trainer.resume_mode=disable or another trainer.default_local_dir. "
            + "; ".join(wrong[:_MAX_SHOWN])
            + more
        )


def _joined_shapes(param: Param, shape: ModelShape) -> list[tuple[int, ...]]:
    """What a layout may have stored: the vocabulary is padded for the tp_size of the run that saved."""
    tp_sizes = [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]
    return sorted({param.joined_shape(shape, padded_vocab_size(shape.vocab_size, size)) for size in tp_sizes})


def _rng_state() -> dict[str, torch.Tensor]:
    state = {f"tracker.{name}": value for name, value in _rng_tracker().get_states().items()}
    state["torch"] = torch.get_rng_state()
    state["device"] = torch.cuda.get_rng_state()
    return {name: value.clone().contiguous() for name, value in state.items()}


def _rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "the ranks have not joined"
    return tracker


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    prefix = "tracker."
    _rng_tracker().set_states({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
