"""The program that tries an implementation of FlashAttention, named as its argument, as a rank would take it up.

With head sizes after the name, on a GPU, a small attention of each is computed with it and compared with torch's own.
It prints why the implementation cannot be had on the GPUs of this machine, or null.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scalerl.parallel.flash_attention import Refusal, take_up, visible_capabilities


def main() -> None:
    impl, *head_sizes = sys.argv[1:]
    capabilities = visible_capabilities()
    refusal = take_up(impl, capabilities)
    if refusal is None and capabilities and head_sizes:
        refusal = _tried(impl, [int(size) for size in head_sizes])
    print(json.dumps(None if refusal is None else asdict(refusal)))


def _tried(impl: str, head_sizes: list[int]) -> Refusal | None:
    # Imports megatron.
    from scalerl.parallel.attention_trial import attended, first_difference
    from scalerl.parallel.flash_attention import use_flash_attention

    use_flash_attention(None)
    own = {size: attended(size, "cuda") for size in head_sizes}
    use_flash_attention(impl)
    difference = first_difference(own, "cuda")
    return None if difference is None else Refusal(difference)


if __name__ == "__main__":
    main()
