"""One engine's model, optimizer and random state as a distributed checkpoint that any layout can load.

Every rank writes and reads what it holds: its range of the optimizer's state, as the distributed optimizer splits it,
and its share of the weights that its data-parallel copies hold too. A range of a flat tensor is a few boxes of the
tensor, so what is stored has no trace of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from safetensors.torch import load
from safetensors.torch import save as serialized

from scalerl.base.files import fsync
from scalerl.base.random_states import generator_states, restore_generators
from scalerl.checkpoint.errors import CheckpointReadError, DamagedCheckpointError
from scalerl.checkpoint.pieces import DIST_CKPT, Piece, WrittenFile, boxes, write_file, write_index
from scalerl.checkpoint.store import RNG, CheckpointWriteError
from scalerl.checkpoint.torch_dist import DistCheckpoint, PieceReader, StoredPiece, while_there
from scalerl.errors import UserError
from scalerl.models import CHECKPOINT_MODEL_ROOTS, ModelShape, Param, padded_vocab_size
from scalerl.parallel.optimizer import adopt_main_parameters, main_tensors, optimizer_parts, set_num_updates

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine

COMMON = "common.pt"
_OPTIMIZER_KEY = "optimizer.state.{name}.{key}"
# Parts of an engine that a checkpoint holds.
_STATE = ("params", "optimizer")
# An error names at most so many tensors.
_MAX_SHOWN = 8
# Of a rank's random states, those that are text (`generator_states`).
_TEXTS = ("python", "numpy")
# One key per layer, so that merge can read layer by layer.
_METADATA = {"non_homogeneous_layers": True}


class CheckpointMismatchError(UserError):
    """The checkpoint belongs to another model."""


@dataclass(frozen=True)
class _Part:
    """A stretch of a parameter's memory that is a box of a stored tensor.

    start: of the stretch in the parameter.  shape: of the stored tensor.  offsets, sizes: of the box in it.
    """

    key: str
    start: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # Whether this rank, with its data-parallel copies, is the one that saves it.
    is_main: bool

    def within(self, start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Boxes of the stored tensor that make up the parameter's [start, stop): (start in it, offsets, sizes)."""
        first, last = max(start, self.start), min(stop, self.start + prod(self.sizes))
        for box_start, offsets, sizes in boxes(self.sizes, first - self.start, last - self.start):
            whole = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
            yield box_start + self.start, whole, sizes


@dataclass(frozen=True)
class Share:
    """What one rank writes of a checkpoint, and the state that is the same on all ranks (`common`)."""

    rank: int
    pieces: Iterable[Piece]
    rng: dict[str, torch.Tensor]
    common: dict[str, Any]

    def write(self, directory: Path) -> WrittenFile:
        """Writes the share into directory/dist_ckpt and directory/rng, which are made if missing; no collective."""
        for name in (DIST_CKPT, RNG):
            (directory / name).mkdir(parents=True, exist_ok=True)
        rng_file = directory / RNG / f"rank_{self.rank}.safetensors"
        # Written here, as safetensors and torch do not say by an OSError that there is no room.
        rng_file.write_bytes(serialized(self.rng))
        written = write_file(directory / DIST_CKPT / f"__{self.rank}_0.distcp", self.pieces)
        # Only now: the disk takes both together.
        fsync(rng_file)
        return written


def save_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Saves the engine's state as directory/dist_ckpt and directory/rng/rank_*.safetensors. Collective.

    The caller commits the directory. Takes the memory of one piece at most. Raises CheckpointWriteError, on every rank,
    if any rank could not write.
    """
    directory = Path(directory)
    share = own_share(engine)
    written = _together(lambda: share.write(directory))
    files: list[Any] | None = [None] * dist.get_world_size() if share.rank == 0 else None
    dist.gather_object(written, files)
    if files is None:
        _together(lambda: None)
    else:
        _together(lambda: write_index(directory / DIST_CKPT, files, share.common))


def own_share(engine: MegatronEngine) -> Share:
    """This rank's share of a checkpoint; no collective. Its pieces are the engine's memory, as it is when read."""
    engine.require_on_device(*_STATE, work="saving a checkpoint", reads=True)
    return Share(dist.get_rank(), _own_pieces(engine), _rng_state(), _common_state(engine))


def load_engine(engine: MegatronEngine, directory: str | Path) -> None:
    """Loads the engine's state from a checkpoint that any layout saved. Collective.

    The random state is loaded if the checkpoint has one for each rank; else a run says that it is not (`resumed_lines`
    of the trainer). Raises CheckpointMismatchError, before any weight changes, if the checkpoint is of another model,
    and DamagedCheckpointError, on every rank, if any byte of the tensors is not what was saved: load another checkpoint
    then. CheckpointReadError and RemovedCheckpointError say that they could not be read. Each rank compares what it
    reads, and a share of what none needs, so that no byte is read only to be compared.
    """
    directory = Path(directory)
    engine.require_on_device(*_STATE, work="loading a checkpoint")
    engine.before_change()
    with while_there(directory), DistCheckpoint(directory / DIST_CKPT) as stored:
        _check_model(engine, stored)
        common = torch.load(stored.dir / COMMON, map_location="cpu", weights_only=True)
        reads_weights = _reads_weights(engine, stored)
        _together(lambda: _read(engine, stored, weights=reads_weights))
        unread = _read_by_none(engine, stored)[dist.get_rank() :: dist.get_world_size()]
        _together(lambda: _compare(stored, unread))
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


def _together(work: Callable[[], Any]) -> Any:
    """Runs `work` on all ranks and returns its result; if any rank fails, all raise the first failure. Collective."""
    result, failure = None, None
    try:
        result = work()
    except (OSError, UserError, ValueError, CheckpointReadError) as error:
        failure = error
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else (type(failure).__name__, str(failure)))
    failed = [(rank, *reason) for rank, reason in enumerate(failures) if reason is not None]
    if not failed:
        return result
    rank, kind, message = failed[0]
    for error in (DamagedCheckpointError, CheckpointReadError):
        if kind == error.__name__:
            raise error(message) from failure
    raise CheckpointWriteError(f"rank {rank} could not write its part of the checkpoint: {message}") from failure


def _own_pieces(engine: MegatronEngine) -> Iterator[Piece]:
    """The pieces of the model and the optimizer that this rank saves."""
    parts_by_tensor = {tensor: (parts, copy) for tensor, parts, copy in _model_tensors(engine)}
    for tensor, (parts, (dp_rank, dp_size)) in parts_by_tensor.items():
        yield from _pieces("{key}", tensor.detach().view(-1), 0, parts, dp_rank, dp_size)
    for parameter, start, tensors, is_range in main_tensors(engine.optimizer):
        parts, (dp_rank, dp_size) = parts_by_tensor[parameter]
        for name, tensor in tensors.items():
            key = _OPTIMIZER_KEY.format(name=name, key="{key}")
            yield from _pieces(
                key, tensor.detach().view(-1), start, parts, *((0, 1) if is_range else (dp_rank, dp_size))
            )


def _pieces(
    key: str, flat: torch.Tensor, start: int, parts: list[_Part], dp_rank: int, dp_size: int
) -> Iterator[Piece]:
    """The pieces of one parameter that this rank saves: each of its dp_size copies saves an equal stretch.

    flat: numbers of the parameter from `start` on.
    """
    first, last = (start + flat.numel() * rank // dp_size for rank in (dp_rank, dp_rank + 1))
    for part in parts:
        if part.is_main:
            for box_start, offsets, sizes in part.within(first, last):
                tensor = flat[box_start - start : box_start - start + prod(sizes)].view(sizes)
                yield Piece(key.format(key=part.key), part.shape, offsets, tensor)


def _reads_weights(engine: MegatronEngine, stored: DistCheckpoint) -> bool:
    """Whether ranks read the weights that others update, instead of gathering them: faster than gloo, slower than NCCL.

    Only where they are stored in the dtype that the model has. The same on all ranks.
    """
    dtypes = {
        param.name: torch.float32 if param.keeps_float32 else engine.config.params_dtype
        for param in engine.family.params(engine.shape)
    }
    return dist.get_backend() == dist.Backend.GLOO and all(
        stored.tensors[name].dtype == dtype for name, dtype in dtypes.items()
    )


def _read(engine: MegatronEngine, stored: DistCheckpoint, *, weights: bool) -> None:
    """Reads this rank's range of the optimizer's state in place, and what no optimizer holds.

    weights: reads the weights that only other ranks' optimizers hold, too.
    """
    parts_by_tensor = {tensor: parts for tensor, parts, _ in _model_tensors(engine)}
    held = {}
    for parameter, start, tensors, _ in main_tensors(engine.optimizer):
        held[parameter] = start, start + tensors["param"].numel()
        for name, tensor in tensors.items():
            for part in parts_by_tensor[parameter]:
                key = _OPTIMIZER_KEY.format(name=name, key=part.key)
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


def _read_part(stored: DistCheckpoint, key: str, part: _Part, start: int, flat: torch.Tensor) -> None:
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


def _model_tensors(engine: MegatronEngine) -> Iterator[tuple[torch.Tensor, list[_Part], tuple[int, int]]]:
    """Every parameter and buffer that a checkpoint holds, its parts, and (rank, size) among its copies."""
    for chunk in engine.chunks:
        for sharded in nested_values(chunk.sharded_state_dict(metadata=dict(_METADATA))):
            if isinstance(sharded, ShardedTensorFactory | ShardedTensor):
                tensor = sharded.data
                assert tensor is not None
                built = list(nested_values(sharded.build())) if isinstance(sharded, ShardedTensorFactory) else [sharded]
                yield tensor, [_part(tensor, shard) for shard in built], _copies(engine, tensor, sharded.replica_id)


def _part(tensor: torch.Tensor, sharded: ShardedTensor) -> _Part:
    data = sharded.data
    assert data is not None and data.is_contiguous(), sharded.key
    replicas = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id, 0)
    return _Part(
        sharded.key,
        int(data.storage_offset() - tensor.storage_offset()),
        tuple(sharded.global_shape),
        tuple(sharded.global_offset),
        (1,) * sharded.prepend_axis_num + tuple(data.shape),
        not any(replicas[:-1]),
    )


def _copies(engine: MegatronEngine, tensor: torch.Tensor, replica_id: Any) -> tuple[int, int]:
    # This attribute marks parameters of experts, which have fewer copies.
    is_expert = not getattr(tensor, "allreduce", True)
    group = engine.groups.expert_dp if is_expert else engine.groups.dp_cp
    assert isinstance(replica_id, tuple) and replica_id[-1] == group.rank(), "megatron counts other copies"
    return group.rank(), group.size()


def _common_state(engine: MegatronEngine) -> dict[str, Any]:
    """The state that is the same on all ranks."""
    scaler = getattr(optimizer_parts(engine.optimizer)[0], "grad_scaler", None)
    common = {"num_updates": engine.num_updates, "layout": asdict(engine.groups.layout)}
    if scaler is None:
        return common
    state = {name: value.cpu() if torch.is_tensor(value) else value for name, value in scaler.state_dict().items()}
    return common | {"grad_scaler": state}


def _set_loss_scale(optimizer: Any, common: dict[str, Any]) -> None:
    scaler = getattr(optimizer_parts(optimizer)[0], "grad_scaler", None)
    # Megatron's own saves have it among the state of the (first) optimizer.
    optimizer_state = common.get("optimizer", {})
    state = (
        common.get("grad_scaler") or optimizer_state.get("grad_scaler") or optimizer_state.get(0, {}).get("grad_scaler")
    )
    if scaler is not None and state is not None:
        scaler.load_state_dict(state)


def _check_model(engine: MegatronEngine, checkpoint: DistCheckpoint) -> None:
    """Raises CheckpointMismatchError where the checkpoint has other tensors than the model.

    Every rank compares the whole model, not its part: all refuse together, none waits in a collective.
    """
    stored = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    params = {param.name: param for param in engine.family.params(engine.shape)}
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


def _rng_state() -> dict[str, torch.Tensor]:
    state = {f"tracker.{name}": value for name, value in _rng_tracker().get_states().items()}
    state["torch"] = torch.get_rng_state()
    state["device"] = torch.cuda.get_rng_state()
    # Code of the user's own may draw from them.
    texts = generator_states()
    state |= {name: torch.frombuffer(bytearray(texts[name].encode()), dtype=torch.uint8) for name in _TEXTS}
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
    # A checkpoint of an earlier version has none.
    restore_generators({name: state[name].numpy().tobytes().decode() for name in _TEXTS if name in state})
