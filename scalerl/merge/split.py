"""The inverse of a merge: writes a Hugging Face model as the ranks of a layout would save it, without these ranks.

Merges are tested with it. Training cannot resume from it: that needs an optimizer's state, which a Hugging Face model
does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path

import torch

from scalerl.checkpoint.pieces import Piece, boxes, write_file, write_index
from scalerl.config import LayoutSizes
from scalerl.merge.writer import whole_directory
from scalerl.models import (
    CHECKPOINT_MODEL_PREFIX,
    HFWeights,
    ModelShape,
    Param,
    copy_beside_weights,
    family_of,
    padded_vocab_size,
)


def split_sizes(
    *, tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None
) -> LayoutSizes:
    """The layout of these sizes with as few ranks as hold whole copies of the dense layers and of the experts.

    etp: None is tp.
    """
    etp = tp if etp is None else etp
    stage_size = math.lcm(tp * cp, etp * ep)
    return LayoutSizes(stage_size * pp, tp_size=tp, pp_size=pp, cp_size=cp, ep_size=ep, etp_size=etp, vpp_size=vpp)


def stage_of_layer(sizes: LayoutSizes, num_layers: int) -> list[int]:
    """The stage that has each layer: the first chunks of all stages follow each other, then the second ones."""
    chunks = sizes.chunks(num_layers)
    return [stage for _ in range(sizes.vpp_size) for stage, size in enumerate(chunks) for _ in range(size)]


def split(hf_dir: str | Path, target_dir: str | Path, sizes: LayoutSizes) -> int:
    """Writes target_dir/dist_ckpt, a file of each rank, and target_dir/huggingface. Returns the number of ranks.

    Raises ValueError: a size below 1, or one that the model cannot be divided by; a target that exists already.
    """
    source, target = Path(hf_dir), Path(target_dir)
    shape = ModelShape.from_hf(source)
    _check(shape, sizes)
    if target.exists():
        raise ValueError(f"{target} is there already; give a directory to make")
    with whole_directory(target) as tmp:
        data = tmp / "dist_ckpt"
        data.mkdir()
        with HFWeights(source) as weights:
            weights.check(family_of(shape), shape)
            weights.check_head(tied=shape.tie_word_embeddings)
            files = [
                write_file(data / f"__{rank}_0.distcp", pieces_of_rank(weights, shape, sizes, rank))
                for rank in range(sizes.world_size)
            ]
        write_index(data, files, {"num_updates": 0, "layout": asdict(sizes)})
        (tmp / "huggingface").mkdir()
        copy_beside_weights(source, tmp / "huggingface")
    return sizes.world_size


def pieces_of_rank(weights: HFWeights, shape: ModelShape, sizes: LayoutSizes, rank: int) -> Iterator[Piece]:
    """The pieces that a rank saves: of each shard that it and other ranks hold, an equal stretch.

    Ranks count as Megatron's: tensor parallel first, pipeline stages last.
    """
    stage, rank_in_stage = divmod(rank, sizes.stage_size)
    stages = stage_of_layer(sizes, shape.num_layers)
    for param in family_of(shape).params(shape):
        if param.layer is None:
            stage_of_param = 0 if param.stage_part == "first" else sizes.pp_size - 1
        else:
            stage_of_param = stages[param.layer]
        if stage != stage_of_param:
            continue
        if param.expert is None:
            size, (copy, shard_rank) = sizes.tp_size, divmod(rank_in_stage, sizes.tp_size)
            num_copies = sizes.stage_size // size
        else:
            size = sizes.etp_size
            copy, shard_rank = divmod(rank_in_stage, size)
            copy, ep_rank = divmod(copy, sizes.ep_size)
            num_copies = sizes.stage_size // (size * sizes.ep_size)
            if ep_rank != param.expert * sizes.ep_size // shape.num_experts:
                continue
        if param.kind == "replicated":
            # One rank of those that share a layer saves what all of them hold.
            if shard_rank:
                continue
            shard = param.shard(weights.read, shape, 0, 1)
        else:
            shard = param.shard(weights.read, shape, shard_rank, size)
        if weights.block is not None and not param.keeps_float32:
            shard = shard.to(getattr(torch, shape.dtype))
        yield from _pieces(param, shard, shape, shard_rank, size, copy, num_copies)


def _pieces(
    param: Param, shard: torch.Tensor, shape: ModelShape, shard_rank: int, size: int, copy: int, num_copies: int
) -> Iterator[Piece]:
    """The stretch of the shard that this copy saves, as boxes of the whole tensor."""
    rows = padded_vocab_size(shape.vocab_size, size) if param.kind == "vocab" else None
    whole = param.joined_shape(shape, rows)
    flat = shard.contiguous().view(-1)
    first, last = (flat.numel() * n // num_copies for n in (copy, copy + 1))
    start = 0
    for offsets, sizes in _places(param, tuple(shard.shape), whole, shard_rank, size):
        count = prod(sizes)
        for begin, inner, box_sizes in boxes(sizes, max(0, first - start), min(count, last - start)):
            tensor = flat[start + begin : start + begin + prod(box_sizes)].view(box_sizes)
            box_offsets = tuple(a + b for a, b in zip(offsets, inner, strict=True))
            yield Piece(CHECKPOINT_MODEL_PREFIX + param.name, whole, box_offsets, tensor)
        start += count


def _places(
    param: Param, local: tuple[int, ...], whole: tuple[int, ...], shard_rank: int, size: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of the whole tensor that follow each other in a shard's memory, as (offsets, sizes)."""
    rest = (0,) * (len(local) - 1)
    if param.kind == "gate_up":
        half = local[0] // 2
        for part in range(2):
            yield (part * whole[0] // 2 + shard_rank * half, *rest), (half, *local[1:])
    elif param.kind == "row":
        yield (0, shard_rank * local[1], *rest[1:]), local
    else:
        yield (0 if param.kind == "replicated" else shard_rank * local[0], *rest), local


def _check(shape: ModelShape, sizes: LayoutSizes) -> None:
    size_by_option = {
        "--tp": sizes.tp_size,
        "--pp": sizes.pp_size,
        "--vpp": sizes.vpp_size,
        "--cp": sizes.cp_size,
        "--ep": sizes.ep_size,
        "--etp": sizes.etp_size,
    }
    problems = [f"{name} {size} must be at least 1" for name, size in size_by_option.items() if size < 1]
    if problems:
        raise ValueError("; ".join(problems))
    if sizes.vpp_size > 1 and sizes.pp_size == 1:
        problems.append(f"--vpp {sizes.vpp_size} needs --pp above 1")
    elif sizes.pipeline_violations(shape.num_layers):
        problems.append(f"--pp {sizes.pp_size} x --vpp {sizes.vpp_size} must divide {shape.num_layers} layers")
    if sizes.ep_size > 1 and (not shape.num_experts or shape.num_experts % sizes.ep_size):
        problems.append(f"--ep {sizes.ep_size} must divide {shape.num_experts} experts")
    for param in family_of(shape).params(shape):
        try:
            param.mcore_shape(shape, sizes.tp_size if param.expert is None else sizes.etp_size)
        except ValueError as error:
            problems.append(str(error))
            break
    if problems:
        raise ValueError("; ".join(problems))
