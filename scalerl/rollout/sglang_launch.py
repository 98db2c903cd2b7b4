"""`python -m scalerl.rollout.sglang_launch ARGS`: `python -m sglang.launch_server ARGS`, on a CPU too."""

from __future__ import annotations

import os
import sys

from scalerl.rollout.cpu_shim import SHIM_DIR


def sglang_environment() -> dict[str, str]:
    """Environment variables that a process needs before it imports sglang; empty where torch sees a GPU.

    They are inherited, so that the scheduler processes that SGLang spawns have them too.
    """
    import torch

    if torch.cuda.is_available():
        return {}
    paths = [SHIM_DIR, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def main() -> None:
    # A fresh interpreter: PYTHONPATH counts from its start, and torch is not held twice.
    command = [sys.executable, "-m", "sglang.launch_server", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **sglang_environment()})


if __name__ == "__main__":
    main()
