"""HF safetensors -> this rank's parameters. Each rank reads only its slices, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scalerl.families import Family, HFWeights, ModelShape, Param
from scalerl.parallel.layout import Groups
from scalerl.parallel.model import layers_of_stage


def local_params(family: Family, shape: ModelShape, groups: Groups) -> Iterator[tuple[Param, str]]:
    """The table's parameters that live on this rank's stage, each with its name inside the stage's model."""
    layers = layers_of_stage(shape.num_layers, groups)
    for param in family.params(shape):
        if param.layer is not None:
            if param.layer in layers:
                yield param, param.name.replace(f"layers.{param.layer}.", f"layers.{param.layer - layers.start}.", 1)
        elif param.stage_part == "first":
            if groups.is_first_stage:
                yield param, param.name
            elif groups.is_last_stage and shape.tie_word_embeddings:
                # Tied weights on more than one stage: megatron keeps a copy of the embedding as the output layer.
                yield param, "output_layer.weight"
        elif groups.is_last_stage:
            yield param, param.name


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, model_path: str, family: Family, shape: ModelShape, groups: Groups) -> None:
    """model: this stage's GPTModel. Raises ValueError listing every missing, extra or wrongly shaped tensor."""
    weights = HFWeights(model_path)
    weights.check(family, shape)
    parameters = dict(model.named_parameters())
    for param, name in local_params(family, shape, groups):
        shard = param.shard(weights.read, shape, groups.at.tp_rank, groups.layout.tp_size)
        target = parameters.pop(name)
        assert target.shape == shard.shape, f"{name}: model {tuple(target.shape)}, table {tuple(shard.shape)}"
        target.copy_(shard)
        if param.kind != "replicated":
            # megatron marks split parameters only while it initialises them, which we skip; without the mark the
            # gradient norm counts one tp rank's part alone.
            target.tensor_model_parallel = True
            target.partition_dim = 1 if param.kind == "row" else 0
            target.partition_stride = 1
    assert not parameters, f"parameters that no table entry fills: {sorted(parameters)}"
