"""PackedAttention on CUDA (one variable-length flash call) against float32 attention of each sequence by itself.

The call's arguments are
checked everywhere in tests/unit/parallel/test_flash_call.py.

    python -m pytest tests/gpu/test_packed_attention.py -q
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scalerl.batch.data_proto import cu_seqlens_of
from scalerl.cluster.probes.gpu import try_flash_attention
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, TrainerConfig
from scalerl.parallel.attention import PackedAttention
from scalerl.parallel.flash_attention import IMPLS, use_flash_attention
from scalerl.parallel.layout import Layout
from scalerl.parallel.micro_batch import Packing
from scalerl.trainer.build import agree_on_attention
from scalerl.trainer.checks.machine import choose_attention
from scalerl.trainer.ranks.worker import MegatronWorker

# Of a sequence of one token, of lengths around the kernels' tile sizes, and of one long sequence.
LENGTHS = (1, 7, 64, 129, 1, 300, 1024)
NUM_HEADS = 8
# bfloat16 rounds each number by up to 2^-9 = 0.002 of itself; a product of rounded numbers and the rounded result make
# two to three such errors. Relative Frobenius norms.
FORWARD_BOUND = 0.01
GRADIENT_BOUND = 0.02


def inputs(num_kv_heads: int, head_dim: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, head_dim) for heads in (NUM_HEADS, num_kv_heads, num_kv_heads)]
    drawn = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    return [tensor.to(device).requires_grad_() for tensor in drawn]


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[T, heads, d]"""
    cu_seqlens = cu_seqlens_of(LENGTHS).to(query.device, torch.int32)
    packing = Packing(cu_seqlens_q=cu_seqlens, max_seqlen_q=max(LENGTHS), lengths=LENGTHS)
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self")
    return attention(query, key, value, packed_seq_params=packing).view_as(query)


def by_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by the definition: softmax over the past of each sequence, in the dtype of the inputs."""
    outputs = []
    for q, k, v in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(outputs)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double().cpu() - expected.double().cpu()).norm() / expected.double().norm().cpu())


def check_against_definition(num_kv_heads: int, head_dim: int, device: str) -> None:
    tensors = inputs(num_kv_heads, head_dim, device)
    exact = [tensor.detach().cpu().float().requires_grad_() for tensor in tensors]
    weights = torch.randn(sum(LENGTHS), NUM_HEADS, head_dim, generator=torch.Generator().manual_seed(1))
    out, expected = packed(*tensors), by_sequence(*exact)
    assert relative(out, expected) < FORWARD_BOUND
    (out.float() * weights.to(device)).sum().backward()
    (expected * weights).sum().backward()
    for name, tensor, reference in zip(("query", "key", "value"), tensors, exact, strict=True):
        assert relative(tensor.grad, reference.grad) < GRADIENT_BOUND, name


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_output_and_gradients_are_those_of_each_sequence_alone(num_kv_heads: int, head_dim: int) -> None:
    check_against_definition(num_kv_heads, head_dim, "cuda")


def test_each_flash_attention_of_the_machine() -> None:
    """trainer.flash_attention_impl: flash-attn-4 is in the lock, so Hopper and data center Blackwell have one."""
    refusals = try_flash_attention(*FLASH_ATTENTION_IMPLS)
    allowed = [impl for impl, refusal in refusals.items() if refusal is None]
    if not allowed and find_spec("flash_attn") is None and find_spec("flash_attn_interface") is None:
        pytest.skip(f"neither FlashAttention 3 nor 4 is installed: {refusals}")
    assert "FA4" in allowed or torch.cuda.get_device_capability()[0] not in IMPLS["FA4"].majors, refusals
    try:
        for impl in allowed:
            use_flash_attention(impl)
            for num_kv_heads in (8, 2, 1):
                check_against_definition(num_kv_heads, 128, "cuda")
    finally:
        use_flash_attention(None)


def test_what_a_run_takes_by_itself_is_what_this_gpu_runs() -> None:
    """trainer.flash_attention_impl=auto: chosen as before a start, and taken up as a rank does."""
    errors = ErrorCollector()
    choice = choose_attention(errors, TrainerConfig(), {"m": 128}, "cuda", runs_here=True)
    refusals = try_flash_attention(*FLASH_ATTENTION_IMPLS, head_sizes={128})
    allowed = [impl for impl, refusal in refusals.items() if refusal is None]
    assert (choice.impls, errors.violations) == (tuple(allowed), [])
    rank = MegatronWorker(0, Layout(world_size=1), device="cuda", collective_timeout_s=1.0, seed=1)
    try:
        agree_on_attention(choice.impls, lambda impl: [rank.take_up_flash_attention(impl)], pytest.fail)
        assert rank.current_flash_attention() == (allowed[0] if allowed else None)
        check_against_definition(2, 128, "cuda")
    finally:
        use_flash_attention(None)


def test_a_sequence_sees_neither_its_neighbours_nor_its_future() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(2, 64, "cuda"))
    before = packed(query, key, value)
    start = sum(LENGTHS[:3])
    # A token in the middle of sequence 3 changes that sequence from there on, and nothing else.
    key[start + 60] += 1.0
    value[start + 60] += 1.0
    changed = (packed(query, key, value) != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == list(range(start + 60, start + LENGTHS[3]))
