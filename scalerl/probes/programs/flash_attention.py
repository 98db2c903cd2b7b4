"""The program that tries an implementation of FlashAttention, named as its argument, as a rank would take it up.

It prints why the implementation cannot be had on the GPUs of this machine, or null.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scalerl.parallel.flash_attention import take_up, visible_capabilities


def main() -> None:
    refusal = take_up(sys.argv[1], visible_capabilities())
    print(json.dumps(None if refusal is None else asdict(refusal)))


if __name__ == "__main__":
    main()
