"""Saves of one engine's model, optimizer and random state as a distributed checkpoint that any layout can load.

Every rank writes the state that it holds: its range of the optimizer's state, as the distributed optimizer splits it,
and its share of the weights that its data-parallel copies hold too. A range of a flat tensor is a few boxes of the
tensor, so the files have no trace of the layout. `restore` loads it.

A save in the background copies a rank's share to the host in one thread and writes the copy in another. Weights and
optimizer change in an update, some time after a save began: only what changes or moves them waits for the copy.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from safetensors.torch import save as serialized

from scalerl.base.files import fsync
from scalerl.base.random_states import generator_states
from scalerl.checkpoint.errors import CheckpointReadError, DamagedCheckpointError
from scalerl.checkpoint.pieces import DIST_CKPT, Piece, WrittenFile, boxes, write_file, write_index
from scalerl.checkpoint.store import RNG, CheckpointWriteError
from scalerl.errors import UserError
from scalerl.models.adapters import adapter_params
from scalerl.parallel.expert_weights import stacked_name
from scalerl.parallel.loading import place
from scalerl.parallel.optimizer import optimizer_parts

if TYPE_CHECKING:
    from scalerl.parallel.engine import MegatronEngine

OPTIMIZER_KEY = "optimizer.state.{name}.{key}"
# Parts of an engine that a checkpoint holds.
STATE = ("params", "optimizer")
# Of a rank's random states, those that are text (`generator_states`).
TEXTS = ("python", "numpy")
# One key per layer, so that merge can read layer by layer.
_METADATA = {"non_homogeneous_layers": True}
# In a host copy each piece begins at a multiple of this: what any vectorised copy wants.
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Part:
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
    written = together(lambda: share.write(directory))
    files: list[Any] | None = [None] * dist.get_world_size() if share.rank == 0 else None
    dist.gather_object(written, files)
    if files is None:
        together(lambda: None)
    else:
        together(lambda: write_index(directory / DIST_CKPT, files, share.common))


def own_share(engine: MegatronEngine) -> Share:
    """This rank's share of a checkpoint; no collective. Its pieces are the engine's memory, as it is when read."""
    engine.require_on_device(*STATE, work="saving a checkpoint", reads=True)
    return Share(dist.get_rank(), _own_pieces(engine), _rng_state(), _common_state(engine))


def together(work: Callable[[], Any]) -> Any:
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
    parts_by_tensor = {tensor: (parts, copy) for tensor, parts, copy in model_tensors(engine)}
    for tensor, (parts, (dp_rank, dp_size)) in parts_by_tensor.items():
        yield from _pieces("{key}", tensor.detach().view(-1), 0, parts, dp_rank, dp_size)
    for parameter, start, tensors, is_range in main_tensors(engine.optimizer):
        parts, (dp_rank, dp_size) = parts_by_tensor[parameter]
        for name, tensor in tensors.items():
            key = OPTIMIZER_KEY.format(name=name, key="{key}")
            yield from _pieces(
                key, tensor.detach().view(-1), start, parts, *((0, 1) if is_range else (dp_rank, dp_size))
            )


def _pieces(key: str, flat: torch.Tensor, start: int, parts: list[Part], dp_rank: int, dp_size: int) -> Iterator[Piece]:
    """The pieces of one parameter that this rank saves: each of its dp_size copies saves an equal stretch.

    flat: numbers of the parameter from `start` on.
    """
    first, last = (start + flat.numel() * rank // dp_size for rank in (dp_rank, dp_rank + 1))
    for part in parts:
        if part.is_main:
            for box_start, offsets, sizes in part.within(first, last):
                tensor = flat[box_start - start : box_start - start + prod(sizes)].view(sizes)
                yield Piece(key.format(key=part.key), part.shape, offsets, tensor)


def model_tensors(engine: MegatronEngine) -> Iterator[tuple[torch.Tensor, list[Part], tuple[int, int]]]:
    """Every parameter and buffer that a checkpoint holds, its parts, and (rank, size) among its copies."""
    of_adapter = {tensor: parts for tensor, parts in adapter_tensors(engine)} if engine.shape.adapter else {}
    for tensor, parts in of_adapter.items():
        yield tensor, parts, _copies(engine, tensor)
    for chunk in engine.chunks:
        for sharded in nested_values(chunk.sharded_state_dict(metadata=dict(_METADATA))):
            if isinstance(sharded, ShardedTensorFactory | ShardedTensor):
                tensor = sharded.data
                assert tensor is not None
                # With an adapter what it leaves as it is, is not saved.
                if of_adapter and (tensor in of_adapter or not tensor.requires_grad):
                    continue
                built = list(nested_values(sharded.build())) if isinstance(sharded, ShardedTensorFactory) else [sharded]
                copies, replica_id = _copies(engine, tensor), sharded.replica_id
                assert isinstance(replica_id, tuple) and replica_id[-1] == copies[0], "megatron counts other copies"
                yield tensor, [_part(tensor, shard) for shard in built], copies


def adapter_tensors(engine: MegatronEngine) -> Iterator[tuple[torch.Tensor, list[Part]]]:
    """Every parameter of an engine's adapter on this rank, and its parts: of stacked experts one for each."""
    parts: dict[torch.Tensor, list[Part]] = {}
    parameters = [dict(chunk.named_parameters()) for chunk in engine.chunks]
    layout, at, shape = engine.groups.layout, engine.groups.coordinates, engine.shape
    for param, chunk, name in place(adapter_params(shape), shape, engine.groups):
        rank, size = (at.tp_rank, layout.tp_size) if param.expert is None else (0, 1)
        name, expert = stacked_name(name)
        # Copies of an expert are all counted in their group.
        is_main = param.kind != "replicated" or rank == 0
        start = (expert or 0) * prod(param.mcore_shape(shape, size))
        for before, offsets, sizes in param.boxes(shape, rank, size):
            part = Part(param.name, start + before, param.joined_shape(shape), offsets, sizes, is_main)
            parts.setdefault(parameters[chunk][name], []).append(part)
    yield from parts.items()


def _part(tensor: torch.Tensor, sharded: ShardedTensor) -> Part:
    data = sharded.data
    assert data is not None and data.is_contiguous(), sharded.key
    replicas = sharded.replica_id if isinstance(sharded.replica_id, tuple) else (sharded.replica_id, 0)
    return Part(
        sharded.key,
        int(data.storage_offset() - tensor.storage_offset()),
        tuple(sharded.global_shape),
        tuple(sharded.global_offset),
        (1,) * sharded.prepend_axis_num + tuple(data.shape),
        not any(replicas[:-1]),
    )


def _copies(engine: MegatronEngine, tensor: torch.Tensor) -> tuple[int, int]:
    # This attribute marks parameters of experts, which have fewer copies.
    is_expert = not getattr(tensor, "allreduce", True)
    group = engine.groups.expert_dp if is_expert else engine.groups.dp_cp
    return group.rank(), group.size()


def main_tensors(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor], bool]]:
    """Yields the optimizer's tensors of each parameter of this rank's model: (parameter, start, tensors, is_range).

    tensors: `param` (the main parameter), `exp_avg`, `exp_avg_sq`, as they are in use. They are the numbers of the
    parameter from `start` on: those of this rank alone (is_range, the distributed optimizer), or all of them.
    """
    for part in optimizer_parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            mains = _main_ranges(part)
            for bucket in (b for ranges in part.gbuf_ranges for buckets in ranges.values() for b in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, _with_moments(part, mains[parameter]), True
        else:
            for parameter, main in _main_parameters(part):
                yield parameter, 0, _with_moments(part, main), False


def _main_ranges(part: DistributedOptimizer) -> dict[torch.Tensor, torch.Tensor]:
    """The main parameter of each parameter of which this rank has a range.

    megatron's map counts the parameters of a group in their order, and its optimizer has those in float32 first
    (megatron-core 0.19.2): a model in bfloat16 with some in float32 gets wrong ones by the map.
    """
    mains: dict[torch.Tensor, torch.Tensor] = {}
    for number, group in enumerate(part.optimizer.param_groups):
        members = [parameter for parameter, place in part.model_param_group_index_map.items() if place[0] == number]
        members.sort(key=lambda parameter: part.model_param_group_index_map[parameter][1])
        # The sort is stable.
        members.sort(key=lambda parameter: parameter.dtype != torch.float32)
        mains |= dict(zip(members, group["params"], strict=True))
    return mains


def _main_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (model's parameter, main parameter) of an optimizer that every data-parallel rank has whole."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for ours, theirs in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(ours, theirs, strict=True)
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    yield from ((parameter, parameter) for group in groups for parameter in group)


def _with_moments(part: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    state = part.optimizer.state[main]
    return {"param": main} | {name: state[name] for name in ("exp_avg", "exp_avg_sq")}


def _common_state(engine: MegatronEngine) -> dict[str, Any]:
    """The state that is the same on all ranks."""
    scaler = getattr(optimizer_parts(engine.optimizer)[0], "grad_scaler", None)
    common = {"num_updates": engine.num_updates, "layout": asdict(engine.groups.layout)}
    if engine.shape.adapter is not None:
        common |= {"adapter": asdict(engine.shape.adapter), "base_digest": engine.base_digest}
    if scaler is None:
        return common
    state = {name: value.cpu() if torch.is_tensor(value) else value for name, value in scaler.state_dict().items()}
    return common | {"grad_scaler": state}


def _rng_state() -> dict[str, torch.Tensor]:
    state = {f"tracker.{name}": value for name, value in rng_tracker().get_states().items()}
    state["torch"] = torch.get_rng_state()
    state["device"] = torch.cuda.get_rng_state()
    # Code of the user's own may draw from them.
    texts = generator_states()
    state |= {name: torch.frombuffer(bytearray(texts[name].encode()), dtype=torch.uint8) for name in TEXTS}
    return {name: value.clone().contiguous() for name, value in state.items()}


def rng_tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "the ranks have not joined"
    return tracker


# --- saves in the background ---


class BackgroundSave:
    """Writes one rank's shares of checkpoints, of the model of each of its roles, in background threads."""

    def __init__(self) -> None:
        # Two: the copy of one role does not wait for the disk that takes another's.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._memory: dict[str, HostCopy] = {}
        self._writing: dict[str, tuple[Share, Future[WrittenFile]]] = {}

    def begin(self, role: str, engine: MegatronEngine, directory: str | Path) -> None:
        """Begins to save a role's model as it is now; from now on `engine.before_change` waits until it is copied.

        Waits first for a save of the role that is still being written. A missing directory is made.
        """
        self.wait(role)
        share, memory, copied = own_share(engine), self._memory.setdefault(role, HostCopy()), threading.Event()
        ready = None
        if engine.device == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        engine.before_change = copied.wait
        copies: Future[list[Piece]] = Future()
        # Without the pieces: they are the engine's memory, which may leave.
        self._writing[role] = replace(share, pieces=()), self._writer.submit(_write, share, copies, Path(directory))
        # Last, because a thread that copies holds the interpreter for milliseconds.
        self._copier.submit(_copy, memory, share.pieces, ready, copied, copies)

    def wait(self, role: str) -> None:
        """Blocks until no save of that role is being written."""
        if role in self._writing:
            self._writing[role][1].exception()

    def written(self, role: str) -> tuple[WrittenFile, dict[str, Any]] | None:
        """The file that the role's last save wrote, and the state that all ranks share; None while it is being written.

        Raises CheckpointWriteError when the file could not be written.
        """
        share, writing = self._writing[role]
        if not writing.done():
            return None
        try:
            return writing.result(), share.common
        except OSError as error:
            raise CheckpointWriteError(
                f"rank {share.rank} could not write its part of the checkpoint: {error}"
            ) from error

    def close(self) -> None:
        """Waits for the saves that are being written, and releases the memory of their copies."""
        self._copier.shutdown()
        self._writer.shutdown()
        for memory in self._memory.values():
            memory.release()


def _copy(
    memory: HostCopy,
    pieces: Iterable[Piece],
    ready: torch.cuda.Event | None,
    copied: threading.Event,
    copies: Future[list[Piece]],
) -> None:
    try:
        copies.set_result(memory.copy_pieces(pieces, ready))
    except BaseException as error:
        copies.set_exception(error)
    finally:
        copied.set()


def _write(share: Share, copies: Future[list[Piece]], directory: Path) -> WrittenFile:
    return replace(share, pieces=copies.result()).write(directory)


class HostCopy:
    """Host memory for the pieces that a rank saves, of their size and no more; kept from one save to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy_pieces(self, pieces: Iterable[Piece], ready: torch.cuda.Event | None = None) -> list[Piece]:
        """Copies the pieces to host memory. The copies stay until the next call.

        ready: of pieces on a GPU, the event after which they have the values to copy; a separate stream copies them.
        """
        taken = list(pieces)
        sizes = (-(-piece.tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for piece in taken)
        starts = list(itertools.accumulate(sizes, initial=0))
        self._reserve(starts[-1], pin=ready is not None)
        copies = []
        with _own_stream(ready):
            for piece, start in zip(taken, starts, strict=False):
                memory = self._memory[start : start + piece.tensor.nbytes]
                host = memory.view(piece.tensor.dtype).view(piece.tensor.shape)
                host.copy_(piece.tensor.detach(), non_blocking=True)
                copies.append(replace(piece, tensor=host))
        return copies

    def release(self) -> None:
        """Releases the memory; the pieces that were taken are then gone."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _reserve(self, num_bytes: int, *, pin: bool) -> None:
        if num_bytes <= len(self._memory):
            return
        self.release()
        memory = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The first copy would else wait for each page of 4 KiB by itself.
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        if pin:
            # torch's own pinned memory comes in powers of two. Where it is refused the copies are slower, no more.
            self._pinned = int(_cuda_runtime().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0)) == 0


@contextmanager
def _own_stream(ready: torch.cuda.Event | None) -> Iterator[None]:
    """Runs the block's work for the GPU in a separate stream, after `ready`, and waits for the work."""
    if ready is None:
        yield
        return
    with torch.cuda.device(ready.device):
        stream = torch.cuda.Stream()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()
