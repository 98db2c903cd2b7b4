"""A program: SGLang's own attention on a CPU and ours, as its registry makes them, on the same tensors. Prints JSON.

Runs in an environment in which sglang imports on a CPU (`shim_environment`).
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.allocation import get_last_loc
from sglang.srt.model_executor.forward_batch_info import compute_position
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from scalerl.rollout.servers.sglang import cpu_attention
from scalerl.rollout.servers.sglang.plugin import ATTENTION_BACKEND

SEQ_LENS, PREFIX_LENS = [30, 25, 31, 29], [20, 0, 28, 0]
CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "extend": {},
    "bfloat16 decode": {"dtype": torch.bfloat16},
    "bfloat16 extend": {"dtype": torch.bfloat16},
    "one decode": {"num_seqs": 1},
    "window decode": {"sliding_window_size": 8},
    "window extend": {"sliding_window_size": 8},
    "encoder decode": {"encoder_lens": torch.tensor([3, 1, 4, 2])},
    "encoder extend": {"encoder_lens": torch.tensor([3, 1, 4, 2])},
    "cross decode": {"encoder_lens": torch.tensor([3, 1, 4, 2]), "is_cross_attn": True},
    "both directions extend": {"causal": False},
    "narrow values decode": {"v_head_dim": 4},
}
num_calls = 0


def counted(module: Any) -> None:
    original = module.scaled_dot_product_attention

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        global num_calls
        num_calls += 1
        return original(*args, **kwargs)

    module.scaled_dot_product_attention = call


def run(backend_name: str, kind: str, options: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """(output, calls of torch's attention)"""
    global num_calls
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    backend = ATTENTION_BACKENDS[backend_name](runner)
    options = dict(options)
    dtype, num_seqs = options.pop("dtype", torch.float32), options.pop("num_seqs", 4)
    v_head_dim = options.pop("v_head_dim", 8)
    draw = torch.Generator().manual_seed(0)
    seq_lens = torch.tensor(SEQ_LENS[:num_seqs])
    prefix_lens = torch.tensor(PREFIX_LENS[:num_seqs]) if kind == "extend" else seq_lens - 1
    new_lens = seq_lens - prefix_lens
    req_to_token = torch.randperm(240, generator=draw).view(6, 40).int()
    query = torch.randn(int(new_lens.sum()), 4, 8, generator=draw).to(dtype)
    k_cache = torch.randn(240, 2, 8, generator=draw).to(dtype)
    v_cache = torch.randn(240, 2, v_head_dim, generator=draw).to(dtype)
    output = torch.full((query.shape[0], 4, v_head_dim), torch.nan, dtype=dtype)
    lengths = (seq_lens, prefix_lens, new_lens) if kind == "extend" else (seq_lens,)
    method = backend._run_sdpa_forward_extend if kind == "extend" else backend._run_sdpa_forward_decode
    options = {"scaling": 0.3, "enable_gqa": True, "causal": kind == "extend", **options}
    num_calls = 0
    method(query, output, k_cache, v_cache, req_to_token, torch.tensor([4, 0, 5, 2])[:num_seqs], *lengths, **options)
    return output.float(), num_calls


def main() -> None:
    load_plugins()
    counted(torch_native_backend)
    counted(cpu_attention)
    report: dict[str, Any] = {}
    for name, options in CASES.items():
        (loop, loop_calls), (ours, our_calls) = (
            run(backend, name.split()[-1], options) for backend in ("torch_native", ATTENTION_BACKEND)
        )
        report[name] = {"difference": float((loop - ours).abs().max()), "loop": loop_calls, "ours": our_calls}
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    report["classes"] = {
        name: inspect.getmodule(type(ATTENTION_BACKENDS[name](runner))).__name__
        for name in ("torch_native", ATTENTION_BACKEND)
    }
    report["taken"] = prepare_server_args(
        ["--model-path", "unused", "--device", "cpu", "--attention-backend", ATTENTION_BACKEND]
    ).attention_backend
    # What has a variant in triton: the positions of new tokens, and where the last one of each sequence is.
    positions, _ = compute_position(ATTENTION_BACKEND, torch.tensor([3, 0]), torch.tensor([2, 1]), 3)
    last = get_last_loc(torch.arange(12).view(3, 4), torch.tensor([2, 1]), torch.tensor([3, 0]))
    report["positions"], report["last"] = positions.tolist(), last.tolist()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
