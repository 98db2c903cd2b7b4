"""The variable-length flash call is right for the installed torch: checked on fake CUDA tensors, no GPU needed.

Values are compared on a GPU in tests/gpu/test_packed_attention.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl.parallel.attention import PackedAttention, attend_in_sequences
from scalerl.parallel.micro_batch import Packing


class Calls(TorchDispatchMode):
    """Remembers the arguments of the flash operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "torch_attn::_varlen_attn":
            self.seen.append(dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs)
        return func(*args, **kwargs)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_one_causal_flash_call_for_the_whole_micro_batch(num_kv_heads: int) -> None:
    attention = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self")
    with torch.no_grad(), FakeTensorMode(), Calls() as calls:
        query = torch.empty(10, 4, 16, device="cuda", dtype=torch.bfloat16)
        key, value = (torch.empty(10, num_kv_heads, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cu_seqlens = torch.empty(3, device="cuda", dtype=torch.int32)
        packing = Packing(cu_seqlens_q=cu_seqlens, max_seqlen_q=6, lengths=(4, 6))
        out = attention(query, key, value, packed_seq_params=packing)
        assert (out.shape, out.device.type, out.dtype) == ((10, 64), "cuda", torch.bfloat16)
    (call,) = calls.seen
    assert call["is_causal"] is True
    assert (call["max_q"], call["max_k"]) == (6, 6)
    assert call["query"].shape[1] == 4
    assert call["key"].shape[1] in (num_kv_heads, 4)


def test_one_call_for_all_sequences_that_see_what_comes_after() -> None:
    with torch.no_grad(), FakeTensorMode(), Calls() as calls:
        states = [torch.empty(10, 4, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        out = attend_in_sequences(*states, torch.empty(3, device="cuda", dtype=torch.int32), 6, 0.5)
        assert (out.shape, out.dtype) == ((10, 4, 16), torch.bfloat16)
    (call,) = calls.seen
    assert call["is_causal"] is False and (call["max_q"], call["scale"]) == (6, 0.5)
