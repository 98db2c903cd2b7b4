"""Loads of one engine's state from a distributed checkpoint that any layout saved (`checkpoint`)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors.torch import load

from scalerl.base.random_states import restore_generators
from scalerl.checkpoint.pieces import DIST_CKPT, StoredPiece
from scalerl.checkpoint.store import RNG
from scalerl.checkpoint.torch_dist import DistCheckpoint, PieceReader, while_there
from scalerl.errors import UserError
from scalerl.models import CHECKPOINT_MODEL_ROOTS, ModelShape, Param, padded_vocab_size
from scalerl.models.adapters import Adapter
from scalerl.parallel.checkpoint import (
    OPTIMIZER_KEY,
    STATE,
    TEXTS,
    Part,
    main_tensors,
    model_tensors,
    rng_tracker,
    together,
)
from scalerl.parallel.optimizer import optimizer_parts

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine

COMMON = "common.pt"
# An error names at most so many tensors.
_MAX_SHOWN = 8


class CheckpointMismatchError(UserError):
    """The checkpoint belongs to another model."""


def load_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Loads the engine's state from a checkpoint that any layout saved. Collective.

    The random state is loaded if the checkpoint has one for each rank; else a run says that it is not (`resumed_lines`
    of the trainer). Raises CheckpointMismatchError, before any weight changes, if the checkpoint is of another model,
    and DamagedCheckpointError, on every rank, if any byte of the tensors is not what was saved: load another checkpoint
    then. CheckpointReadError and RemovedCheckpointError say that they could not be read. Each rank compares what it
    reads, and a share of what none needs, so that no byte is read only to be compared.
    """
    directory = Path(directory)
    engine.require_on_device(*STATE, work="loading a checkpoint")
    engine.before_change()
    with while_there(directory), DistCheckpoint(directory / DIST_CKPT) as stored:
        common = torch.load(stored.dir / COMMON, map_location="cpu", weights_only=True)
        _check_adapter(engine, stored, common)
        _check_model(engine, stored)
        reads_weights = _reads_weights(engine, stored)
        together(lambda: _read(engine, stored, weights=reads_weights))
        unread = _read_by_none(engine, stored)[dist.get_rank() :: dist.get_world_size()]
        together(lambda: _compare(stored, unread))
    adopt_main_parameters(engine.optimizer, gather=not reads_weights)
    engine.num_updates = int(common["num_updates"])
    set_num_updates(engine.optimizer, engine.num_updates)
    _set_loss_scale(engine.optimizer, common)
    engine.schedule.num_steps = engine.num_updates + 1
    engine.schedule.step(0)
    rng_file = directory / RNG / f"rank_{dist.get_rank()}.safetensors"
    if len(list(rng_file.parent.glob("rank_*"))) == dist.get_world_size():
        # Read, not mapped: the states stay in use, and the file is removed with its checkpoint.
        _set_rng_state(load(rng_file.read_bytes()))


def _reads_weights(engine: MegatronEngine, stored: DistCheckpoint) -> bool:
    """Whether ranks read the weights that others update, instead of gathering them: gloo gathers in buffers as large.

    Only where they are stored in the dtype that the model has. The same on all ranks.
    """
    dtypes = {
        param.name: torch.float32 if param.keeps_float32 else engine.config.params_dtype for param in engine.trained
    }
    return dist.get_backend() == dist.Backend.GLOO and all(
        stored.tensors[name].dtype == dtype for name, dtype in dtypes.items()
    )


def _read(engine: MegatronEngine, stored: DistCheckpoint, *, weights: bool) -> None:
    """Reads this rank's range of the optimizer's state in place, and what no optimizer holds.

    weights: reads the weights that only other ranks' optimizers hold, too.
    """
    parts_by_tensor = {tensor: parts for tensor, parts, _ in model_tensors(engine)}
    held = {}
    for parameter, start, tensors, _ in main_tensors(engine.optimizer):
        held[parameter] = start, start + tensors["param"].numel()
        for name, tensor in tensors.items():
            for part in parts_by_tensor[parameter]:
                key = OPTIMIZER_KEY.format(name=name, key=part.key)
                _read_part(stored, key, part, start, tensor.detach().view(-1))
    for tensor, parts in parts_by_tensor.items():
        if weights or not getattr(tensor, "requires_grad", False):
            start, stop = held.get(tensor, (0, 0))
            flat = tensor.detach().view(-1)
            for part in parts:
                _read_part(stored, part.key, part, 0, flat[:start])
                _read_part(stored, part.key, part, stop, flat[stop:])


def _read_by_none(engine: MegatronEngine, stored: DistCheckpoint) -> list[StoredPiece]:
    """The pieces that have a digest and that no rank has read. Collective."""
    pieces = [piece for key in sorted(stored.tensors) for piece in stored.pieces(key) if piece.digest is not None]
    if not pieces:
        return []
    is_verified = torch.tensor([stored.is_verified(piece) for piece in pieces], dtype=torch.uint8, device=engine.device)
    dist.all_reduce(is_verified, dist.ReduceOp.MAX)
    return [piece for piece, verified in zip(pieces, is_verified.tolist(), strict=True) if not verified]


def _compare(stored: DistCheckpoint, pieces: Iterable[StoredPiece]) -> None:
    for piece in pieces:
        PieceReader(stored, piece).finish()


def _read_part(stored: DistCheckpoint, key: str, part: Part, start: int, flat: torch.Tensor) -> None:
    """Reads a part of a parameter into `flat`, which holds the parameter's numbers from `start` on.

    A layout with more padding of the vocabulary than the one that saved gets zeros for what was not there.
    """
    for box_start, offsets, sizes in part.within(start, start + flat.numel()):
        target = flat[box_start - start : box_start - start + prod(sizes)].view(sizes)
        if part.shape != stored.shape(key):
            target.zero_()
            rows = min(sizes[0], stored.shape(key)[0] - offsets[0])
            if rows <= 0:
                continue
            sizes, target = (rows, *sizes[1:]), target[:rows]
        stored.read_box(key, (offsets, sizes), target)


def _set_loss_scale(optimizer: Any, common: dict[str, Any]) -> None:
    scaler = getattr(optimizer_parts(optimizer)[0], "grad_scaler", None)
    # Megatron's own saves have it among the state of the (first) optimizer.
    optimizer_state = common.get("optimizer", {})
    state = (
        common.get("grad_scaler") or optimizer_state.get("grad_scaler") or optimizer_state.get(0, {}).get("grad_scaler")
    )
    if scaler is not None and state is not None:
        scaler.load_state_dict(state)


def _check_adapter(engine: MegatronEngine, checkpoint: DistCheckpoint, common: dict[str, Any]) -> None:
    """Raises CheckpointMismatchError where the checkpoint has another adapter, one of another model, or none."""
    adapter, stored = engine.shape.adapter, common.get("adapter")
    there = None if stored is None else Adapter(**stored)
    if there != adapter:
        raise CheckpointMismatchError(
            f"{checkpoint.dir} has {_trained(there)}, and the run trains {_trained(adapter)}. Set lora_rank, "
            "lora_alpha and target_modules as they were, another trainer.default_local_dir, or "
            "trainer.resume_mode=disable"
        )
    if adapter is not None and common["base_digest"] != engine.base_digest:
        raise CheckpointMismatchError(
            f"{checkpoint.dir} has an adapter of weights whose SHA-256 is {common['base_digest']}, and that of the "
            f"weights of {engine.model_path} is {engine.base_digest}. Give the model that the run began with, another "
            "trainer.default_local_dir, or trainer.resume_mode=disable"
        )


def _trained(adapter: Adapter | None) -> str:
    if adapter is None:
        return "all weights"
    return f"an adapter of rank {adapter.rank} and alpha {adapter.alpha:g} for {', '.join(adapter.targets)}"


def _check_model(engine: MegatronEngine, checkpoint: DistCheckpoint) -> None:
    """Raises CheckpointMismatchError where the checkpoint has other tensors than the model.

    Every rank compares the whole model, not its part: all refuse together, none waits in a collective.
    """
    stored = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    params = {param.name: param for param in engine.trained}
    wrong = []
    for name, param in params.items():
        shapes = _joined_shapes(param, engine.shape)
        if name not in stored:
            wrong.append(f"{name}: not in the checkpoint")
        elif stored[name] not in shapes:
            wrong.append(f"{name}: {stored[name]}, the model has {' or '.join(map(str, shapes))}")
    wrong += [
        f"{key}: not in the model"
        for key in sorted(stored)
        if key.startswith(CHECKPOINT_MODEL_ROOTS) and key not in params
    ]
    if not engine.shape.frozen_tower:
        wrong += [
            f"{name}: without an optimizer's state, as model.freeze_vision_tower=true saves it"
            for name, param in params.items()
            if param.of_tower and OPTIMIZER_KEY.format(name="param", key=name) not in checkpoint.tensors
        ]
    if wrong:
        more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        raise CheckpointMismatchError(
            f"{checkpoint.dir} is from another model; set trainer.resume_mode=disable or another "
            "trainer.default_local_dir. " + "; ".join(wrong[:_MAX_SHOWN]) + more
        )


def _joined_shapes(param: Param, shape: ModelShape) -> list[tuple[int, ...]]:
    """The shapes that a layout may have stored: the vocabulary is padded for the tp_size of the run that saved."""
    tp_sizes = [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]
    return sorted({param.joined_shape(shape, padded_vocab_size(shape.vocab_size, size)) for size in tp_sizes})


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    prefix = "tracker."
    rng_tracker().set_states({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    # A checkpoint of an earlier version has none.
    restore_generators({name: state[name].numpy().tobytes().decode() for name in TEXTS if name in state})


@torch.no_grad()
def adopt_main_parameters(optimizer: Any, *, gather: bool = True) -> None:
    """Copies the main parameters into the model's: those of this rank's range, then those of all ranks. Collective.

    gather: False if the model has those of other ranks already.
    """
    parts = [part for part in optimizer_parts(optimizer) if not part.is_stub_optimizer]
    for part in parts:
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    if not gather:
        return
    chunks = {
        id(chunk): chunk
        for part in optimizer_parts(optimizer)
        if isinstance(part, DistributedOptimizer)
        for chunk in part.model_chunks
    }
    chunk: Any
    for chunk in chunks.values():
        # Waits with overlap_param_gather too: what follows may be a sync of the weights.
        chunk.start_param_sync(force_sync=True)


def set_num_updates(optimizer: Any, num_updates: int) -> None:
    """Sets the number of updates that Adam has made: torch's Adam keeps it by parameter, fused ones by group."""
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)
        if not isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                # Not there yet before their first step, which would then begin to count.
                group["step"] = num_updates
