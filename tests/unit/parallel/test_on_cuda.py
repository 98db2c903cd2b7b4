"""What only a GPU takes of the trainer's code, on fake CUDA tensors: shapes, dtypes and calls, no GPU needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scalerl.algorithms.kl import top_k_kl
from scalerl.config.schema import MegatronConfig
from scalerl.models import ModelShape
from scalerl.parallel.engine import _loss
from scalerl.parallel.layout import Layout
from scalerl.parallel.logprobs import _multiplies_into_float32, linear_logprobs, linear_top_logprobs
from scalerl.parallel.micro_batch import MicroBatch
from scalerl.parallel.model import transformer_config
from scalerl.rollout.sync.transports.broadcast import NCCL_GRACE_S, BroadcastTransport
from tests.model_configs import read_config

NUM_TOKENS, HIDDEN, WORDS = 32, 64, 512


class Calls(TorchDispatchMode):
    """Remembers each operation with the dtypes of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[torch.dtype, torch.Size]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        results = output if isinstance(output, tuple | list) else [output]
        self.seen.append((str(func), [(r.dtype, r.shape) for r in results if isinstance(r, torch.Tensor)]))
        return output

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def test_products_of_half_precision_go_into_float32() -> None:
    """As `linear_logprobs` multiplies on a GPU, but for where the result goes, which fake tensors cannot say.

    Numbers are compared in test_logprobs.py, with the same calls answered by a CPU.
    """
    with FakeTensorMode():
        hidden = torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(WORDS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        assert _multiplies_into_float32(hidden)
        assert not _multiplies_into_float32(torch.empty(2, dtype=torch.bfloat16))
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        gradient = torch.empty(NUM_TOKENS, WORDS, dtype=torch.bfloat16, device="cuda")
        total = torch.addmm(torch.empty(WORDS, HIDDEN, device="cuda"), gradient.t(), hidden, out_dtype=torch.float32)
    assert (logits.dtype, logits.shape) == (torch.float32, (NUM_TOKENS, WORDS))
    assert (total.dtype, total.shape, total.device.type) == (torch.float32, (WORDS, HIDDEN), "cuda")
    assert {"dtype_out"} <= set(torch.ops.aten.mm.overloads()) & set(torch.ops.aten.addmm.overloads())


def test_the_loss_of_a_micro_batch_does_not_wait_for_the_device() -> None:
    """The count of tokens is filled in on the device; a copy of a number of the host would wait."""
    batch: Any = SimpleNamespace(num_tokens=7, columns={}, cu_seqlens=None)
    with FakeTensorMode():
        output = torch.empty(5, device="cuda")
        with Calls() as calls:
            loss, num_tokens, kept = _loss(
                batch, lambda batch, output: (output,), lambda logprobs, columns: (logprobs.sum(), {}), output
            )
    assert (num_tokens.device.type, num_tokens.dtype, num_tokens.shape) == ("cuda", torch.int, ())
    assert loss.device.type == "cuda" and kept == {}
    assert calls.names == ["aten.sum.default", "aten.full.default"]


@pytest.mark.parametrize("vpp_size", [1, 2])
def test_stages_do_not_wait_for_the_device_after_each_exchange(vpp_size: int) -> None:
    """megatron would, by its default, after every batched send and receive."""
    shape = ModelShape.from_config(read_config("qwen3-8b"))
    groups: Any = SimpleNamespace(layout=Layout(4, pp_size=2, vpp_size=vpp_size))
    config = transformer_config(shape, MegatronConfig(), groups, on_cpu=False)
    assert config.batch_p2p_sync is False
    assert config.batch_p2p_comm is (vpp_size == 1)
    assert transformer_config(shape, MegatronConfig(), groups, on_cpu=True).batch_p2p_comm is False


def test_an_nccl_group_outlives_the_request_that_it_serves() -> None:
    """Else NCCL's watchdog could end the trainer in the moment in which a server that hangs is given up."""
    nccl, gloo = (
        BroadcastTransport(lambda *_: iter(()), backend=backend, timeout_s=600.0) for backend in ("nccl", "gloo")
    )
    assert nccl.group_timeout_s == 600.0 + NCCL_GRACE_S > nccl.timeout_s
    assert gloo.group_timeout_s == gloo.timeout_s == 600.0


def test_words_of_a_teacher_do_not_wait_for_the_device() -> None:
    """Tensors of the device meta have no values: what reads one, or makes a shape of values, raises."""
    device, words = "meta", {"vocab_size": WORDS - 3, "chunk_tokens": 8}
    hidden = torch.empty(NUM_TOKENS, HIDDEN, device=device, requires_grad=True)
    weight, labels = (
        torch.empty(WORDS, HIDDEN, device=device),
        torch.empty(NUM_TOKENS, dtype=torch.int64, device=device),
    )
    *_, top_logprobs, top_ids = linear_top_logprobs(hidden, weight, labels, top_k=8, **words)
    batch: Any = SimpleNamespace(labels=labels, prediction_indices=labels, is_first=labels.bool())
    moved = MicroBatch.to_predicting_token(batch, top_ids, 0, 1)
    described = MicroBatch.to_described_token(batch, moved)
    logprobs, _ = linear_logprobs(hidden, weight, torch.cat([labels[:, None], moved], 1), **words)
    top_k_kl(logprobs[:, 1:], top_logprobs).sum().backward()
    assert top_ids.shape == described.shape == (NUM_TOKENS, 8) and logprobs.shape == (NUM_TOKENS, 9)
    assert hidden.grad is not None and hidden.grad.device.type == device
    with pytest.raises((RuntimeError, NotImplementedError)):
        labels.nonzero()
