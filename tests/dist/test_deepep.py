"""Tokens of experts by DeepEP (`megatron.override_transformer_config.moe_enable_deepep`): megatron's real dispatcher.

DeepEP itself needs GPUs. What megatron calls of it is replaced here by the same exchange over gloo; the choice of the
dispatcher, its metadata, permutation, and scalerl's layer of experts around it are the real ones.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from tests.dist.launch import run_ranks
from tests.dist.test_experts import ABSOLUTE, RELATIVE, VOCAB_SIZE, Rank
from tests.lanes import full
from tests.tiny_models import make_tiny_model

# Arguments of Layout.
LAYOUTS: dict[str, dict[str, int]] = {
    "ep2": {"world_size": 2, "ep_size": 2},
    "tp2_ep2": {"world_size": 2, "tp_size": 2, "ep_size": 2},
    "tp2_etp2": {"world_size": 2, "tp_size": 2, "etp_size": 2},
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Tokens of each rank of the group, and which of all of them are on this rank.
Handle = tuple[list[int], Tensor]


def gathered(mine: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """The rows of all ranks, in the order of the ranks."""
    parts = [mine.new_zeros(max(sizes), *mine.shape[1:]) for _ in sizes]
    padded = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine), *mine.shape[1:])])
    torch.distributed.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def returned(theirs: Tensor, group: Any, handle: Handle) -> Tensor:
    """The sum of what the ranks have of each of this rank's rows."""
    sizes, rows = handle
    everything = theirs.new_zeros(sum(sizes), *theirs.shape[1:]).index_add(0, rows, theirs)
    torch.distributed.all_reduce(everything, group=group)
    return everything.split(sizes)[group.rank()]


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, probs: Tensor, num_experts: int, group: Any) -> Any:
        num_local = num_experts // group.size()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        torch.distributed.all_gather(counts, torch.tensor([len(x)]), group=group)
        sizes = [int(count) for count in counts]
        local = gathered(indices, group, sizes) - group.rank() * num_local
        is_here = (local >= 0) & (local < num_local)
        rows = is_here.any(1).nonzero()[:, 0]
        ctx.group, ctx.handle, is_here = group, (sizes, rows), is_here[rows]
        received = torch.where(is_here, local[rows], -1)
        received_probs = torch.where(is_here, gathered(probs, group, sizes)[rows], 0.0)
        ctx.is_here = is_here
        per_expert = torch.bincount(received[is_here], minlength=num_local)
        ctx.mark_non_differentiable(received, per_expert)
        return gathered(x, group, sizes)[rows], received, received_probs, per_expert, ctx.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_x, _, grad_probs, _, _ = grads
        of_probs = torch.where(ctx.is_here, grad_probs, 0.0)
        return returned(grad_x, ctx.group, ctx.handle), None, returned(of_probs, ctx.group, ctx.handle), None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, handle: Handle) -> Tensor:
        ctx.group, ctx.handle = group, handle
        return returned(x, group, handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes, rows = ctx.handle
        return gathered(grads[0], ctx.group, sizes)[rows], None, None


def fused_dispatch(
    x: Tensor,
    token_indices: Tensor,
    token_probs: Tensor,
    num_experts: int,
    group: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> Any:
    """Sends each token once to each rank that has any of its experts.

    Returns tokens, their experts by local number (-1: of another rank), probs, tokens of each local expert, a handle.
    """
    assert token_probs.dtype == torch.float32
    return Dispatch.apply(x.contiguous(), token_indices, token_probs, num_experts, group)


def fused_combine(
    x: Tensor, group: Any, handle: Handle, async_finish: bool = False, allocate_on_comm_stream: bool = False
) -> Any:
    """Sends each token's outputs back, summed over the ranks."""
    return Combine.apply(x, group, handle), None


def set_deepep_num_sms(num_sms: int) -> None:
    """A number of a GPU's multiprocessors."""


STAND_INS = (fused_dispatch, fused_combine, set_deepep_num_sms)


def test_what_stands_in_has_the_arguments_of_megatrons_calls() -> None:
    """Read from the source: where DeepEP is absent, megatron has no such functions."""
    module = ast.parse(Path(fused_a2a.__file__).read_text())
    theirs = {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
    for ours in STAND_INS:
        arguments = [argument.arg for argument in theirs[ours.__name__].args.args]
        assert arguments == list(inspect.signature(ours).parameters)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    return make_tiny_model(path, "qwen3_moe", vocab_size=VOCAB_SIZE, initializer_range=0.1, num_experts=8)


@contextmanager
def deepep_over_gloo() -> Iterator[None]:
    from megatron.core.transformer.moe import token_dispatcher

    with pytest.MonkeyPatch.context() as patched:
        for function in STAND_INS:
            patched.setattr(token_dispatcher, function.__name__, function)
        yield


def train(model: str, layout: dict[str, int], deepep: bool, megatron: dict[str, Any]) -> dict[str, Any]:
    """Log-probs and two updates; which dispatcher the layers have, and what they keep of a pass that has a graph."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if deepep:
        megatron = megatron | {"override_transformer_config": {"moe_enable_deepep": True}}
    with deepep_over_gloo():
        rank = Rank(model, layout, **megatron)
        before = rank.logprobs()
        updates = [rank.update(), rank.update()]
    modules = [module for chunk in rank.engine.chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    dispatchers: list[Any] = [module.token_dispatcher for module in modules]
    holders = [holder for one in dispatchers for holder in (one, getattr(one, "_comm_manager", None)) if holder]
    kept = {
        name
        for holder in holders
        for name, value in vars(holder).items()
        if torch.is_tensor(value) and value.grad_fn is not None
    }
    kinds = {type(one).__name__ for one in dispatchers}
    return {"logprobs": before.get("logprobs"), "updates": updates, "weights": rank.exported()} | {
        "kinds": kinds,
        "kept": kept,
    }


@pytest.mark.parametrize(
    ("layout", "keys"), [("ep2", {}), ("tp2_ep2", {}), full("tp2_etp2", {}), full("ep2", RECOMPUTE)]
)
def test_the_numbers_are_those_of_torchs_exchange(model: Path, layout: str, keys: dict[str, Any]) -> None:
    """Two updates, as copies of experts that are not summed alike differ from the second one on."""
    own, deepep = (run_ranks(2, train, str(model), LAYOUTS[layout], is_deepep, keys) for is_deepep in (False, True))
    for mine, others in zip(deepep, own, strict=True):
        assert mine["kinds"] == {"MoEFlexTokenDispatcher"} and others["kinds"] == {"MoEAlltoAllTokenDispatcher"}
        assert mine["kept"] == others["kept"] == set()
        for one, other in zip(mine["updates"], others["updates"], strict=True):
            assert one == pytest.approx(other, rel=RELATIVE)
        for row, logprobs in (others["logprobs"] or {}).items():
            torch.testing.assert_close(mine["logprobs"][row], logprobs, rtol=0, atol=ABSOLUTE)
        for name, weight in others["weights"].items():
            assert float((mine["weights"][name] - weight).norm() / weight.norm()) < RELATIVE, name
