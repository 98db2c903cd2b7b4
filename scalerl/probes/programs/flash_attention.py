"""The program that tries implementations of FlashAttention, named as arguments, as a rank would take them up.

It prints the compute capabilities of the GPUs, and what each implementation fails with.
"""

from __future__ import annotations

import json
import sys

import torch

from scalerl.errors import UserError
from scalerl.parallel.flash_attention import flash_attention_violation, use_flash_attention


def main() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(count)})
    errors = {}
    for impl in sys.argv[1:]:
        try:
            use_flash_attention(impl)
            errors[impl] = flash_attention_violation(impl, capabilities)
        except UserError as error:
            errors[impl] = str(error)
    print(json.dumps({"capabilities": capabilities, "errors": errors}))


if __name__ == "__main__":
    main()
