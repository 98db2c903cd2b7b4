"""A small attention, forward and backward, by which kernels are compared with torch's own before a run takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from scalerl.batch.data_proto import cu_seqlens_of
from scalerl.parallel.attention import PackedAttention
from scalerl.parallel.micro_batch import Packing

# A sequence of one token, and lengths around the kernels' tile sizes.
LENGTHS = (1, 7, 64, 129, 300)
NUM_HEADS, NUM_KV_HEADS = 4, 2
# bfloat16 rounds each number by up to 2^-9 = 0.002 of itself, and results are some roundings apart. Relative norms.
BOUND = 0.02
RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def attended(head_size: int, device: str) -> list[Tensor]:
    """RESULTS in bfloat16 of the attention that this process calls, [T, heads, head_size] each, always of one input."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, head_size) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)]
    *tensors, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    packing = Packing(
        cu_seqlens_q=cu_seqlens_of(LENGTHS).to(device, torch.int32), max_seqlen_q=max(LENGTHS), lengths=LENGTHS
    )
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self")
    output = attention(query, key, value, packed_seq_params=packing).view_as(query)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]


def first_difference(expected: Mapping[int, Sequence[Tensor]], device: str) -> str | None:
    """Why the attention that this process calls now is not that of before, a clause; None where it is.

    expected: by head size, what `attended` returned before.
    """
    for head_size, before in expected.items():
        try:
            now = attended(head_size, device)
        # Whatever a kernel, or its compiler, fails with.
        except Exception as error:
            return f"a small call with heads of {head_size} fails ({error})"
        for name, theirs, own in zip(RESULTS, now, before, strict=True):
            difference = float((theirs.float() - own.float()).norm() / own.float().norm())
            if not difference <= BOUND:
                return f"with heads of {head_size} its {name} is {difference:.2g} from torch's own, of {BOUND} allowed"
    return None
