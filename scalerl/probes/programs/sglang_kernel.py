"""The program that compiles SGLang's kernel of the gated activation on the GPU and compares its values with torch's."""

from __future__ import annotations

import json
import time

import torch
from sglang.kernels.ops.activation.activation import silu_and_mul


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 2 * 512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 512, device="cuda", dtype=torch.bfloat16)
    start = time.perf_counter()
    silu_and_mul(x, out)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    gate, up = x.float().chunk(2, dim=-1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
