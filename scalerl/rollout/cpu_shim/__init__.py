"""Import stand-ins that let unmodified SGLang run on a CPU: `sgl_kernel` and `torchvision`.

This directory goes on PYTHONPATH of the server process alone (`rollout.sglang_launch`), and never where there is a GPU.
"""

from __future__ import annotations

from pathlib import Path

SHIM_DIR = str(Path(__file__).resolve().parent)
