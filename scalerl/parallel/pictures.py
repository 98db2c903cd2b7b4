"""Pictures of a packed micro-batch: positions of their tokens, the vision tower, and where its output goes.

The tower is transformers' module, whole on each rank of the first stage. It makes a vector of each square of merged
patches, which takes the place of its placeholder's embedding; with deepstack further ones, which are added to the
hidden states after the first layers. A cp rank computes the pictures of its own tokens.

Dims: t tokens of this rank, F features (merged patches) of the pictures, N patches, I pictures.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scalerl.batch.columns import IMAGE_GRID_THW, INPUT_IDS, PIXEL_VALUES, RESPONSE_MASK
from scalerl.batch.data_proto import DataProto
from scalerl.models import ModelShape, family_of
from scalerl.models.table import TOWER_MODULE
from scalerl.models.vision import VisionModel

Grid = tuple[int, int, int]


@dataclass
class Pictures:
    """The pictures that a rank computes in one micro-batch.

    pixels: rows of pixel_values of each picture, in host memory.  grids: patches of each in time, height and width.
    places_t: the rank's tokens that are placeholders.  features_t: which of the F features each of them gets.
    deepstack: what the layers add there, [F, H] for each layer; only between the tower's pass and its last use.
    """

    pixels: Sequence[Tensor]
    grids: Sequence[Grid]
    places: Tensor
    features: Tensor
    deepstack: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class RowPictures:
    """The pictures of some rows, whose real tokens are end to end: T.

    sizes: features of each picture.
    positions_3T: of each token in time, height and width.  feature_T: the feature that a token gets; -1: none.
    """

    pixels: list[Tensor]
    grids: list[Grid]
    sizes: list[int]
    positions_3T: Tensor
    feature_T: Tensor


def pictures_of_rows(batch: DataProto, rows: Sequence[int], vision: VisionModel | None) -> RowPictures | None:
    """The pictures of these rows of a batch, in their order; None if they have none.

    A placeholder that the policy sampled is a word.  Raises ValueError naming a row whose tokens and pictures differ,
    or whose pictures the model cannot see (vision None).
    """
    if PIXEL_VALUES.name not in batch.tokens or not len(batch[IMAGE_GRID_THW].select(rows).values):
        return None
    if vision is None:
        raise ValueError(f"one of the rows {list(rows)} of the batch has a picture, and the model sees none")
    sampled = batch.tokens.get(RESPONSE_MASK.name)
    pixels: list[Tensor] = []
    grids: list[Grid] = []
    sizes: list[int] = []
    positions, features = [], []
    for row in rows:
        is_picture_T = batch[INPUT_IDS][row] == vision.image_token_id
        if sampled is not None:
            is_picture_T &= ~sampled[row].bool()
        of_row: list[Grid] = [(t, h, w) for t, h, w in batch[IMAGE_GRID_THW][row].tolist()]
        patches = batch[PIXEL_VALUES][row].split([t * h * w for t, h, w in of_row])
        of_pictures = [vision.num_tokens(grid) for grid in of_row]
        if int(is_picture_T.sum()) != sum(of_pictures):
            raise ValueError(
                f"row {row} of the batch has {int(is_picture_T.sum())} placeholders of pictures (token "
                f"{vision.image_token_id}), and its pictures of {of_row} patches take {sum(of_pictures)}"
            )
        positions.append(positions_of(is_picture_T, of_row, vision))
        features.append(torch.where(is_picture_T, is_picture_T.cumsum(0) - 1 + sum(sizes), -1))
        pixels += patches
        grids += of_row
        sizes += of_pictures
    return RowPictures(pixels, grids, sizes, torch.cat(positions, 1), torch.cat(features))


def positions_of(is_picture_T: Tensor, grids: Sequence[Grid], vision: VisionModel) -> Tensor:
    """[3, T] positions of a row's tokens in time, height and width, as transformers' get_rope_index counts them.

    A word moves all three by one. The tokens of a picture count from the word before it in each dimension, and the word
    after it follows the largest of them (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    parts, start, position = [], 0, 0
    begins = is_picture_T.nonzero()[:, 0]
    before = 0
    for grid in grids:
        begin = int(begins[before])
        num_words = begin - start
        parts.append((torch.arange(num_words) + position).expand(3, -1))
        position += num_words
        t, h, w = grid[0], grid[1] // vision.merge_size, grid[2] // vision.merge_size
        axes = torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
        position += max(h, w)
        start, before = begin + t * h * w, before + t * h * w
    parts.append((torch.arange(len(is_picture_T) - start) + position).expand(3, -1))
    return torch.cat(parts, 1)


def part_of(pictures: RowPictures, feature_t: Tensor, device: str, sp: tuple[int, int]) -> Pictures | None:
    """The pictures that a cp rank computes, which has tokens with these features; None if it needs none.

    sp: (rank, size) of the tp ranks that share the tokens (sequence parallelism); these compute the same pictures.
    """
    picture_F = torch.arange(len(pictures.sizes)).repeat_interleave(torch.tensor(pictures.sizes))
    mine = picture_F[feature_t[feature_t >= 0]].unique().tolist()
    if not mine:
        return None
    is_mine_F = torch.isin(picture_F, torch.tensor(mine))
    number_F = torch.where(is_mine_F, is_mine_F.cumsum(0) - 1, -1)
    rank, size = sp
    local_t = feature_t.chunk(size)[rank]
    places = (local_t >= 0).nonzero()[:, 0]
    return Pictures(
        [pictures.pixels[i] for i in mine],
        [pictures.grids[i] for i in mine],
        places.to(device),
        number_F[local_t[places]].to(device),
    )


# --- the tower in the model ---


def add_tower(
    chunk: torch.nn.Module,
    shape: ModelShape,
    model_path: str,
    *,
    dtype: torch.dtype,
    recompute: bool,
    sp_group: Any,
    always: bool,
) -> None:
    """Adds the vision tower, whose weights are not set yet, to the first chunk of the model.

    recompute: its blocks keep no activations.  sp_group: of the tp ranks that share the tokens; None: they do not.
    always: one that is trained computes in each micro-batch, without pictures too: ranks that exchange gradients as
    they come, or parameters as they are needed (overlap_grad_reduce, overlap_param_gather), do so in one order.
    """
    vision = shape.vision
    assert vision is not None
    tower = make_tower(shape, model_path, dtype)
    tower.requires_grad_(not shape.frozen_tower)
    if recompute and not shape.frozen_tower:
        keep_no_activations(tower)
    _insert(chunk, tower)
    chunk.register_forward_pre_hook(partial(_embed, sp_group, vision if always else None), with_kwargs=True)
    layers: Any = chunk.get_submodule("decoder.layers")
    for number in range(len(vision.deepstack_blocks)):
        layers[number].register_forward_hook(partial(_add_deepstack, number), with_kwargs=True)
    chunk.register_forward_hook(_forget_deepstack, with_kwargs=True)


def _insert(chunk: torch.nn.Module, tower: torch.nn.Module) -> None:
    """Adds the tower after the embedding: megatron exchanges parameters in the order of their modules."""
    others = {name: module for name, module in chunk.named_children() if name != "embedding"}
    for name in others:
        delattr(chunk, name)
    for name, module in {TOWER_MODULE: tower, **others}.items():
        chunk.add_module(name, module)


def keep_no_activations(tower: Any) -> None:
    """Makes the blocks compute their forward pass again in the backward pass."""
    # gradient_checkpointing_enable does this too, and warns of embeddings that a tower does not have.
    tower._set_gradient_checkpointing(gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))


def make_tower(shape: ModelShape, model_path: str, dtype: torch.dtype) -> Any:
    """transformers' module of the vision tower in the model's config.json; its weights are not set."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    tower = family_of(shape).tower
    assert tower is not None
    module, _, name = tower.transformers_class.rpartition(".")
    made = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    with no_init_weights():
        # Buffers, which no file has, keep the dtype that transformers gives them.
        return made._from_config(AutoConfig.from_pretrained(model_path).vision_config, dtype=dtype)


def _embed(
    sp_group: Any, always: VisionModel | None, chunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Embeds the words, and the pictures in the place of their placeholders, before the model's own forward pass."""
    input_ids, position_ids, _ = args
    embedded = chunk.embedding(input_ids, position_ids)
    tower = chunk.get_submodule(TOWER_MODULE)
    pictures: Pictures | None = kwargs["packed_seq_params"].pictures
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    if pictures is None and is_trained and always is not None:
        pictures = _nowhere(always, embedded.device)
    if pictures is not None:
        with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
            features = _features(tower, pictures, embedded.dtype, sp_group)
        embedded = embedded.index_copy(0, pictures.places, features[pictures.features, None])
    return args, kwargs | {"decoder_input": embedded}


def _nowhere(vision: VisionModel, device: torch.device) -> Pictures:
    """The smallest picture, in the place of no token: its gradients are zeros."""
    side = vision.merge_size
    no_tokens = torch.empty(0, dtype=torch.int64, device=device)
    return Pictures([torch.zeros(side**2, vision.numbers_per_patch)], [(1, side, side)], no_tokens, no_tokens)


def _features(tower: Any, pictures: Pictures, dtype: torch.dtype, sp_group: Any) -> Tensor:
    """[F, H] what takes the place of the embeddings; fills in pictures.deepstack."""
    device = pictures.places.device
    grid_thw = torch.tensor(pictures.grids, device=device)
    output = tower(torch.cat(list(pictures.pixels)).to(device), grid_thw=grid_thw)
    deepstack = [features.to(dtype) for features in getattr(output, "deepstack_features", None) or ()]
    features = output.pooler_output.to(dtype)
    if not features.requires_grad:
        pictures.deepstack[:] = deepstack
        return features
    pictures.deepstack[:] = [layer.detach().requires_grad_() for layer in deepstack]
    return _Features.apply(pictures.deepstack, sp_group, features, *deepstack)


class _Features(torch.autograd.Function):
    """Hands on the features of the embeddings; their gradient brings that of the deepstack's copies with it.

    It comes last, when the layers, some of which compute their forward pass again, are done with the copies.
    """

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], sp_group: Any, features: Tensor, *_: Tensor) -> Tensor:
        ctx.copies, ctx.sp_group = copies, sp_group
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_copies = [torch.zeros_like(grad) if copy.grad is None else copy.grad for copy in ctx.copies]
        grads = torch.stack([grad, *of_copies])
        ctx.copies.clear()
        if ctx.sp_group is not None:
            # Each tp rank has the gradient of its own tokens.
            dist.all_reduce(grads, group=ctx.sp_group)
        return None, None, *grads.unbind()


def _add_deepstack(number: int, _layer: Any, _args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> Any:
    """Adds a layer's features to its hidden states [t, 1, H]."""
    pictures: Pictures | None = kwargs["packed_seq_params"].pictures
    if pictures is None:
        return output
    hidden, context = output
    return hidden.index_add(0, pictures.places, pictures.deepstack[number][pictures.features, None]), context


def _forget_deepstack(chunk: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
    # With gradients the last use is in the backward pass.
    if not chunk.training and (pictures := kwargs["packed_seq_params"].pictures) is not None:
        pictures.deepstack.clear()
