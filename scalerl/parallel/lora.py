"""Low-rank adapters beside the frozen weights of megatron's linear layers and of the experts (`models.adapters`).

Of a layer that splits its output over tp ranks each rank has A whole and its rows of B: what A makes of the tokens,
[t, rank], is gathered with sequence parallelism. Of one that splits its input each rank has its columns of A and B
whole: what A makes of them is summed. So ranks exchange rank numbers of a token, where the layer exchanges all.

Matrices that are whole on all tp ranks are used with each rank's part of the sequence, if it has parts: megatron sums
the gradients of those that are marked `sequence_parallel`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from scalerl.models import HFWeights, ModelShape, Param, family_of
from scalerl.models.adapters import adapter_pairs, adapter_params, read_peft
from scalerl.models.table import InMemory, Read
from scalerl.models.weights import joined_digest
from scalerl.parallel.expert_weights import mark_of_experts, named_tensors
from scalerl.parallel.experts import Experts
from scalerl.parallel.layout import Groups, mark
from scalerl.parallel.loading import fill, local_params, place

# The module of one expert in the family tables; a rank has the weights of all its experts in one module.
_ONE_EXPERT = ".local_experts."


class Pair(torch.nn.Module):
    """A [rank, columns] and B [rows, rank] of one projection; of experts stacked: [experts, ...].

    A module, although it computes nothing, because megatron waits for the parameters of those that are called.
    """

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(like.new_empty(a))
        self.lora_B = torch.nn.Parameter(like.new_empty(b))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.lora_A, self.lora_B


class Pairs:
    """The pairs of one matrix of the model, which may consist of several projections."""

    def __init__(self, param: Param, pairs: Sequence[Pair | None], shape: ModelShape, tp_size: int) -> None:
        """pairs: of each Hugging Face tensor of `param`; None where it has none."""
        self._pairs = pairs
        # Rows come group by group, with those of each projection in turn.
        groups = param.row_groups(shape)
        self._groups = max(groups // tp_size, 1)
        split = tp_size if param.kind not in ("row", "replicated") else 1
        self._rows = [size[0] // split // self._groups for size in param.part_shapes(shape)]

    def joined(self) -> tuple[Tensor, Tensor]:
        """A and B of the whole matrix, of the ranks of all pairs together: B A is the change of this rank's part.

        A has those of the projections below each other. B has its rows as the matrix has them, with zeros where a row
        is of a projection other than that of the column.
        """
        matrices = [None if pair is None else pair() for pair in self._pairs]
        present = [pair for pair in matrices if pair is not None]
        if len(matrices) == 1:
            return present[0]
        rank = present[0][0].shape[-2]
        blocks, before = [], 0
        for pair, rows in zip(matrices, self._rows, strict=True):
            if pair is None:
                b = present[0][1]
                blocks.append(b.new_zeros(*b.shape[:-2], self._groups, rows, rank * len(present)))
                continue
            after = len(present) - 1 - before
            blocks.append(F.pad(pair[1].unflatten(-2, (self._groups, rows)), (before * rank, after * rank)))
            before += 1
        return torch.cat([a for a, _ in present], dim=-2), torch.cat(blocks, dim=-2).flatten(-3, -2)


class Adapters:
    """The adapters of one model chunk: they change what its layers compute while `on`."""

    def __init__(self, scale: float) -> None:
        self.on = True
        self._scale = scale
        # Name of a weight in the chunk -> its pairs, and which of the stacked experts it is of.
        self._pairs: dict[str, tuple[Pairs, int | None]] = {}

    def add(self, name: str, pairs: Pairs, expert: int | None = None) -> None:
        self._pairs[name] = pairs, expert

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight of that name with its adapter, computed in float32; itself if it has none that is on."""
        if not self.on or name not in self._pairs:
            return weight
        pairs, expert = self._pairs[name]
        a, b = pairs.joined()
        if expert is not None:
            a, b = a[expert], b[expert]
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self._scale).to(weight.dtype)

    def changed(self, pairs: Pairs, out: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What a layer computes with its adapter.  multiply: (A, B) -> what they make of the layer's input."""
        return torch.add(out, multiply(*pairs.joined()), alpha=self._scale) if self.on else out


def adapters_of(chunk: torch.nn.Module) -> Adapters | None:
    """The adapters of a model chunk; None without."""
    return vars(chunk).get("adapters")


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Makes the chunks compute as the model that their adapters change, inside the block."""
    switches = [adapters for chunk in chunks if (adapters := adapters_of(chunk)) is not None]
    for adapters in switches:
        adapters.on = False
    try:
        yield
    finally:
        for adapters in switches:
            adapters.on = True


def add_adapters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, groups: Groups, *, sequence_parallel: bool, path: str | None
) -> None:
    """Freezes the weights and adds the adapters of `shape.adapter`, which train; a value head trains as before.

    path: directory of peft that the adapters begin with; None: A random, the same numbers on every layout, and B zero.
    """
    assert shape.adapter is not None
    for chunk in chunks:
        chunk.requires_grad_(False)
        vars(chunk)["adapters"] = Adapters(shape.adapter.scale)
        if groups.is_first_stage and hasattr(chunk, "embedding"):
            # Recompute gives no gradients to layers whose input needs none.
            chunk.get_submodule("embedding").register_forward_hook(_require_grad)
    for param, chunk, name in local_params(family_of(shape), shape, groups):
        if param.stage_part == "last" and shape.head == "value" and name.startswith("output_layer."):
            chunks[chunk].get_parameter(name).requires_grad_(True)
        elif any(adapter_pairs(param, shape)):
            (_adapt_linear if param.expert is None else _adapt_experts)(chunks[chunk], param, name, shape, groups)
    params = adapter_params(shape)
    tensors = [named_tensors(chunk) for chunk in chunks]
    for param, chunk, name in place(params, shape, groups):
        if param.kind == "replicated" and param.expert is None:
            mark(tensors[chunk][name], sequence_parallel=sequence_parallel)
    read = _random(shape) if path is None else partial(_in_memory, read_peft(path, shape)[1])
    fill(chunks, params, read, shape, groups)


def _adapt_linear(chunk: torch.nn.Module, param: Param, name: str, shape: ModelShape, groups: Groups) -> None:
    """Gives a linear layer the pairs of its projections.  name: of its weight in the chunk."""
    module, adapters = chunk.get_submodule(name.removesuffix(".weight")), adapters_of(chunk)
    assert adapters is not None
    pairs = _add_pairs(module, param, shape, groups.layout.tp_size)
    adapters.add(name, pairs)

    def change(_module: torch.nn.Module, args: tuple[Tensor], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        out, bias = output
        return adapters.changed(pairs, out, lambda a, b: _multiply(module, args[0], a, b)), bias

    module.register_forward_hook(change)


def _multiply(module: Any, inputs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What A and B make of a linear layer's input, split over tp ranks as the layer's own output is."""
    # Of two dimensions: with three, how torch rounds depends on whether a pass has gradients.
    low = F.linear(inputs.flatten(0, -2), a)
    across: Callable[..., Tensor] | None = None
    if isinstance(module, ColumnParallelLinear):
        # The gradients that reach it from each rank's rows of B are summed.
        across = copy_to_tensor_model_parallel_region
        if module.sequence_parallel:
            across = gather_from_sequence_parallel_region
    elif isinstance(module, RowParallelLinear):
        across = reduce_from_tensor_model_parallel_region
        if module.sequence_parallel:
            across = reduce_scatter_to_sequence_parallel_region
    low = low if across is None else across(low, group=module.tp_group)
    return F.linear(low, b).unflatten(0, (-1, *inputs.shape[1:-1]))


def _adapt_experts(chunk: torch.nn.Module, param: Param, name: str, shape: ModelShape, groups: Groups) -> None:
    """Gives one of two weights of one expert its pairs; the first of a rank's experts brings those of all."""
    assert groups.layout.etp_size == 1, "an expert with an adapter is on one rank"
    of_layer, _, of_expert = name.partition(_ONE_EXPERT)
    local, _, weight = of_expert.partition(".")
    linear = weight.removesuffix(".weight")
    experts, adapters = chunk.get_submodule(of_layer), adapters_of(chunk)
    assert isinstance(experts, Experts) and adapters is not None
    if int(local) == 0:
        module = experts.get_submodule(linear)
        pairs = _add_pairs(module, param, shape, 1, experts.num_local_experts)
        experts.changes[linear] = partial(adapters.changed, pairs)
        for parameter in module.parameters():
            mark_of_experts(parameter)
    adapters.add(name, experts.changes[linear].args[0], int(local))


def _add_pairs(module: torch.nn.Module, param: Param, shape: ModelShape, tp_size: int, *stacked: int) -> Pairs:
    """Adds the pairs of a matrix to the module that has it.  stacked: the number of experts that they are of."""
    like, pairs = module.get_parameter("weight"), []
    for parts in adapter_pairs(param, shape):
        if parts is None:
            pairs.append(None)
            continue
        a, b = ((*stacked, *part.mcore_shape(shape, tp_size)) for part in parts)
        pairs.append(Pair(a, b, like))
        module.add_module(parts[0].name.split(".")[-2], pairs[-1])
    return Pairs(param, pairs, shape, tp_size)


def _require_grad(_module: torch.nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _random(shape: ModelShape) -> Read:
    """The tensors that training begins with, as peft's: B zero, A uniform with variance 1 / (3 * columns)."""
    sizes = {name: size for param in adapter_params(shape) for name, size in param.hf_shapes(shape).items()}

    def read(name: str) -> InMemory:
        tensor = torch.zeros(sizes[name])
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
            bound = 1 / math.sqrt(sizes[name][1])
            tensor.uniform_(-bound, bound, generator=generator)
        return InMemory(tensor)

    return read


def _in_memory(tensors: Mapping[str, Tensor], name: str) -> InMemory:
    return InMemory(tensors[name])


def base_digest(model_path: str) -> str:
    """The `joined_digest` of a model directory. Collective: each rank reads a share of the tensors."""
    with HFWeights(model_path) as weights:
        mine = weights.names()[dist.get_rank() :: dist.get_world_size()]
        digests = {name: weights.digest(name) for name in mine}
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, digests)
    return joined_digest({name: digest for part in parts for name, digest in part.items()})
