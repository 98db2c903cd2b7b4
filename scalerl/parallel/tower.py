"""The vision tower in the model: transformers' module, whole on each rank of the first stage.

It makes a feature of each square of merged patches, which takes the place of its placeholder's embedding; with
deepstack further ones, which are added to the hidden states after the first layers.

Dims: t tokens of this rank, F features of its pictures, N patches, H hidden size.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scalerl.models import ModelShape, family_of
from scalerl.models.table import TOWER_MODULE
from scalerl.models.vision import VisionModel
from scalerl.parallel.attention import attend_in_sequences
from scalerl.parallel.pictures import Pictures

# transformers hands the bounds of sequences to attention of such a name, and calls others for each one by itself.
_ATTENTION = "scalerl_flash"


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
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tower = family_of(shape).tower
    assert tower is not None
    path, _, name = tower.transformers_class.rpartition(".")
    made = getattr(importlib.import_module(f"transformers.models.{path}"), name)
    with no_init_weights():
        # Buffers, which no file has, keep the dtype that transformers gives them.
        module = made._from_config(AutoConfig.from_pretrained(model_path).vision_config, dtype=dtype)
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    module.config._attn_implementation = _ATTENTION
    return module


def _attend(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: Tensor,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attends to the patches of one's picture, or of its window: [1, heads, N, d] each -> [1, N, heads, d]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend_in_sequences(query, key, value, cu_seq_lens_q, int(max_length_q), scaling)[None], None


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
