"""Context parallelism: attention over swapped heads and tokens, and the public slicing helpers, on real ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerl.batch import Alignment
from tests.dist.launch import run_ranks

LENGTHS = (9, 3, 16, 1)
HEAD_DIM = 8
# float32; the sums of one head of one sequence are taken in the same order on every layout.
ABSOLUTE = 1e-6


def start() -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.group.WORLD


def inputs(num_heads: int, num_kv_heads: int, padded: list[int], value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(num_heads, HEAD_DIM), (num_kv_heads, HEAD_DIM), (num_kv_heads, value_dim)]
    return tuple(torch.randn(sum(padded), *size, generator=generator) for size in sizes)


def attend(tensors: tuple[Tensor, Tensor, Tensor], packing: Any, group: Any, cp_size: int) -> Tensor:
    from types import SimpleNamespace

    from scalerl.parallel.attention import PackedAttention

    config = SimpleNamespace(context_parallel_size=cp_size)
    return PackedAttention(config, 1, None, "self", cp_group=group)(*tensors, packed_seq_params=packing)


def attention_of_a_rank(num_heads: int, num_kv_heads: int, value_dim: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's tokens: the output, and the gradients of a weighted sum of it. In zig-zag order."""
    from scalerl.parallel.micro_batch import Packing
    from scalerl.parallel.ulysses import zigzag_order

    group = start()
    padded = Alignment.of_layout(tp_size=1, cp_size=group.size(), sequence_parallel=False).of_sequences(
        torch.tensor(LENGTHS).numpy()
    )
    order = zigzag_order(tuple(padded.tolist()), group.size())
    mine = order.view(group.size(), -1)[group.rank()]
    packing = Packing(lengths=tuple(padded.tolist()), order=order, natural=order.argsort())
    tensors = tuple(x[mine].requires_grad_() for x in inputs(num_heads, num_kv_heads, padded.tolist(), value_dim))
    out = attend(tensors, packing, group, group.size())
    (out * mine[:, None]).sum().backward()
    return out.detach(), [x.grad for x in tensors]


@pytest.mark.parametrize(
    ("cp_size", "num_heads", "num_kv_heads", "value_dim"),
    [
        (2, 4, 4, HEAD_DIM),
        (2, 4, 2, HEAD_DIM),
        # More ranks than key/value heads.
        (4, 8, 2, HEAD_DIM),
        (4, 4, 1, HEAD_DIM),
        # Neither divides the other.
        (2, 6, 3, HEAD_DIM),
        # Latent attention: values narrower than keys.
        (2, 4, 4, 6),
    ],
)
def test_attention_equals_one_rank(cp_size: int, num_heads: int, num_kv_heads: int, value_dim: int) -> None:
    from scalerl.parallel.micro_batch import Packing
    from scalerl.parallel.ulysses import zigzag_order

    ranks = run_ranks(cp_size, attention_of_a_rank, num_heads, num_kv_heads, value_dim)
    padded = [-(-length // (2 * cp_size)) * 2 * cp_size for length in LENGTHS]
    tensors = tuple(x.requires_grad_() for x in inputs(num_heads, num_kv_heads, padded, value_dim))
    expected = attend(tensors, Packing(lengths=tuple(padded)), None, 1)
    (expected * torch.arange(sum(padded))[:, None]).sum().backward()
    order = zigzag_order(tuple(padded), cp_size)
    torch.testing.assert_close(torch.cat([out for out, _ in ranks]), expected.detach()[order], atol=ABSOLUTE, rtol=1e-5)
    for index, tensor in enumerate(tensors):
        gradient = torch.cat([grads[index] for _, grads in ranks])
        # Gradients are weighted by token positions of up to 40.
        torch.testing.assert_close(gradient, tensor.grad[order], atol=40 * ABSOLUTE, rtol=1e-5)


def test_zigzag_gives_every_rank_the_same_causal_work() -> None:
    from scalerl.parallel.ulysses import zigzag_order

    lengths, cp_size = (16, 8, 40), 4
    order = zigzag_order(lengths, cp_size)
    assert sorted(order.tolist()) == list(range(sum(lengths)))
    starts = [0, *accumulate(lengths)]
    depth = torch.cat([torch.arange(length) for length in lengths])
    work = [int((depth[part] + 1).sum()) for part in order.view(cp_size, -1)]
    assert len(set(work)) == 1, work
    assert starts[-1] == len(order)
    with pytest.raises(ValueError, match="a sequence of 6 tokens cannot be cut"):
        zigzag_order((6,), 2)


def slice_and_gather(num_tokens: int, grad_scaler: bool) -> dict[str, Any]:
    """By a group that is given; without grad_scaler by that of the process."""
    from scalerl.extras.verl import compat

    group, errors = start(), []
    ids = torch.arange(1, num_tokens + 1)[None]
    positions = torch.arange(num_tokens)[None]
    for arguments in ({"sp_size": 3, "group": group}, {"sp_size": 2}):
        try:
            compat.ulysses_pad_and_slice_inputs(ids, positions, **arguments)
        except ValueError as error:
            errors.append(str(error))
    given = group if grad_scaler else None
    compat.set_ulysses_sequence_parallel_group(None if grad_scaler else group)
    try:
        mine, my_positions, padding = compat.ulysses_pad_and_slice_inputs(
            ids, positions, sp_size=2, pad_value=99, group=given
        )
        hidden = mine.float().requires_grad_()
        whole = compat.gather_outputs_and_unpad(hidden * 2, 1, 1, padding, grad_scaler, given)
    finally:
        compat.set_ulysses_sequence_parallel_group(None)
    (whole * torch.arange(num_tokens)).sum().backward()
    return {
        "ids": mine,
        "positions": my_positions,
        "padding": padding,
        "whole": whole.detach(),
        "grad": hidden.grad,
        "errors": errors,
    }


@pytest.mark.parametrize("grad_scaler", [True, False])
@pytest.mark.parametrize("num_tokens", [7, 8])
def test_slices_and_gathers(num_tokens: int, grad_scaler: bool) -> None:
    ranks = run_ranks(2, slice_and_gather, num_tokens, grad_scaler)
    padding = num_tokens % 2
    joined = torch.cat([rank["ids"] for rank in ranks], dim=1)[0].tolist()
    assert joined == [*range(1, num_tokens + 1), *[99] * padding]
    positions = torch.cat([rank["positions"] for rank in ranks], dim=1)[0].tolist()
    assert positions == [*range(num_tokens), *range(padding)]
    grad = torch.cat([rank["grad"] for rank in ranks], dim=1)[0].tolist()
    scale = 2.0 * (2 if grad_scaler else 1)
    assert grad == [*(scale * place for place in range(num_tokens)), *[0.0] * padding]
    for rank in ranks:
        assert rank["padding"] == padding
        assert rank["whole"][0].tolist() == [2.0 * token for token in range(1, num_tokens + 1)]
        assert len(rank["errors"]) == 2 and "needs a group of as many ranks" in rank["errors"][0]


def test_one_rank_needs_no_group() -> None:
    from scalerl.extras.verl.compat import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

    ids, positions, padding = ulysses_pad_and_slice_inputs(torch.ones(1, 3, dtype=torch.int64))
    assert (ids.shape, positions, padding) == ((1, 3), None, 0)
    assert gather_outputs_and_unpad(torch.arange(5.0), 0, 0, 2).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
