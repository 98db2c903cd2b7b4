"""Import stand-ins with which unmodified SGLang runs on a CPU: `sgl_kernel` and `torchvision`.

There is also a `megatron` that cannot be imported, which SGLang takes for missing, and the metadata of a distribution,
whose entry point makes SGLang load `rollout/servers/sglang/plugin.py`. This directory is on PYTHONPATH of server
processes only, and never with a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

SHIM_DIR = str(Path(__file__).resolve().parent)


def shim_environment() -> dict[str, str]:
    """The environment variables that a process without a GPU needs, before it starts, to import sglang.

    The scheduler processes that SGLang spawns inherit them.
    """
    paths = [SHIM_DIR, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
