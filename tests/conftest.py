"""Settings of all tests: one thread per process, a marker per folder, and no GPU test without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch or numpy is imported: tests run several processes on few cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A test that would load something from the network is a defect: fail at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MARKED_FOLDERS = ("dist", "ray", "sglang", "slurm", "e2e", "gpu")
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_gpu = None
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if folder == "gpu":
            skip_gpu = skip_gpu or _skip_without_gpu()
            item.add_marker(skip_gpu)


def _skip_without_gpu() -> pytest.MarkDecorator:
    import torch

    reason = "no GPU; on a machine with one: python -m pytest tests/gpu -q"
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)
