"""Import stand-ins that let unmodified SGLang run on a CPU: `sgl_kernel` and `torchvision`. And a `megatron` that
cannot be imported, which SGLang takes for none.

Beside them the metadata of a distribution, whose entry point makes SGLang load `servers/sglang/plugin.py`. This
directory goes on PYTHONPATH of the server process alone, and never where there is a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

SHIM_DIR = str(Path(__file__).resolve().parent)


def shim_environment() -> dict[str, str]:
    """Environment variables that a process without a GPU needs before it starts, to import sglang.

    The scheduler processes that SGLang spawns inherit them.
    """
    paths = [SHIM_DIR, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
