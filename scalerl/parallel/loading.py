"""Loading of HF safetensors into this rank's parameters: a rank reads only its slices, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from scalerl.models import Family, HFWeights, ModelShape, Param
from scalerl.models.table import Read
from scalerl.parallel.expert_weights import named_tensors
from scalerl.parallel.layout import Groups, mark


def local_params(family: Family, shape: ModelShape, groups: Groups) -> Iterator[tuple[Param, int, str]]:
    """The table's parameters that live on this rank, each with its model chunk and its name inside that chunk."""
    return place(family.params(shape), shape, groups)


def place(params: Iterable[Param], shape: ModelShape, groups: Groups) -> Iterator[tuple[Param, int, str]]:
    """Those of the parameters that live on this rank, as `local_params`."""
    chunks = groups.layout.layers(shape.num_layers, groups.coordinates.pp_rank)
    last = len(chunks) - 1
    experts = groups.layout.experts(shape.num_experts, groups.coordinates.ep_rank)
    for param in params:
        if param.layer is not None:
            for chunk, layers in enumerate(chunks):
                if param.layer in layers:
                    local = param.layer - layers.start
                    name = param.name.replace(f"layers.{param.layer}.", f"layers.{local}.", 1)
                    if param.expert is None:
                        yield param, chunk, name
                    elif param.expert in experts:
                        local_expert = f"local_experts.{param.expert - experts.start}."
                        yield param, chunk, name.replace(f"local_experts.{param.expert}.", local_expert, 1)
        elif param.stage_part == "first":
            if groups.is_first_stage:
                yield param, 0, param.name
            is_tied = shape.tie_word_embeddings and param.kind == "vocab"
            if is_tied and groups.is_last_stage and (groups.layout.pp_size > 1 or last > 0):
                # Tied weights in more than one chunk: megatron keeps a copy of the embedding as the output layer.
                yield param, last, "output_layer.weight"
        elif groups.is_last_stage:
            yield param, last, param.name


@torch.no_grad()
def load_hf_weights(
    chunks: Sequence[torch.nn.Module], model_path: str, family: Family, shape: ModelShape, groups: Groups
) -> None:
    """Fills `chunks`, this stage's models, with the weights of a model directory.

    A value model may start from a language model, whose head is left out: its own head keeps its initial numbers.
    Raises ValueError listing every missing, extra or wrongly shaped tensor.
    """
    stored = ModelShape.from_hf(model_path)
    with HFWeights(model_path) as weights:
        weights.check(family, stored)
        names = family.hf_shapes(stored).keys()
        rest = fill(chunks, family.params(shape), weights.read, shape, groups, names=names)
    assert not rest, f"parameters that no table entry fills: {sorted(rest)}"


@torch.no_grad()
def fill(
    chunks: Sequence[torch.nn.Module],
    params: Iterable[Param],
    read: Read,
    shape: ModelShape,
    groups: Groups,
    *,
    names: Collection[str] | None = None,
) -> set[tuple[int, str]]:
    """Copies this rank's part of the parameters' tensors into the chunks; returns which others the chunks have.

    read: a Hugging Face tensor by its name.  names: of the tensors that there are; the others are left as they are.
    None: all are there.
    """
    tensors = {
        (index, name): tensor for index, model in enumerate(chunks) for name, tensor in named_tensors(model).items()
    }
    at, layout = groups.coordinates, groups.layout
    for param, chunk, name in place(params, shape, groups):
        target = tensors.pop((chunk, name))
        if names is not None and param.hf[0] not in names:
            continue
        rank, size = (at.tp_rank, layout.tp_size) if param.expert is None else (at.etp_rank, layout.etp_size)
        expected = param.mcore_shape(shape, size)
        assert target.shape == expected, f"{name}: model {tuple(target.shape)}, table {expected}"
        param.shard(read, shape, rank, size, out=target)
        if param.kind != "replicated" and param.expert is None:
            # megatron marks its own layers so, and nobody those of ours; without the mark the gradient norm counts one
            # tp rank's part alone.
            mark(target, tensor_model_parallel=True, partition_dim=int(param.kind == "row"), partition_stride=1)
    return set(tensors)
