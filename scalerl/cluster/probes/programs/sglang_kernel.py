"""The program that compiles SGLang's kernel of the gated activation, and on a GPU compares its values with torch's."""

from __future__ import annotations

import argparse
import json
import time

import torch
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.jit.utils.compile import loader
from sglang.kernels.ops.activation import activation

# Compute capability of Hopper.
HOPPER = (9, 0)


def run_on_gpu() -> None:
    """Compiles the kernel for this GPU and runs it."""
    torch.manual_seed(0)
    gate_up = torch.randn(64, 2 * 512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 512, device="cuda", dtype=torch.bfloat16)
    activation.silu_and_mul(gate_up, out)
    torch.cuda.synchronize()
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)


def compile_alone() -> None:
    """Compiles and links the kernel for Hopper, on a machine without a GPU, which cannot load it."""
    loader.__dict__["_load"] = lambda library: None
    with override_jit_cuda_arch(*HOPPER):
        activation.activation_module(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-alone", action="store_true")
    start = time.perf_counter()
    compile_alone() if parser.parse_args().compile_alone else run_on_gpu()
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
