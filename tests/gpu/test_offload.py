"""A model that leaves the GPU between its phases: the same numbers, pinned copies, and memory that is really free.

    pytest tests/gpu/test_offload.py

On a CPU tests/dist/test_offload.py runs the same code, where no memory is pinned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.trainee import Trainee
from tests.gpu.isolated import run_isolated
from tests.tiny_models import make_tiny_model

NUM_UPDATES = 3


def requested_bytes() -> int:
    """Device memory that tensors asked for; the allocator's blocks are larger by up to 1 MiB each."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def train(model: str, dtype: str, away: bool) -> dict[str, Any]:
    trainee = Trainee(model, (1, 1, 1), dtype=dtype)
    engine, history = trainee.engine, {"logprobs": [], "updates": [], "freed": [], "owned": [], "pinned": []}
    for _ in range(NUM_UPDATES):
        if away:
            owned, before = sum(engine.device_bytes().values()), requested_bytes()
            engine.to_host()
            history["owned"].append(owned)
            history["freed"].append(before - requested_bytes())
            groups = [group for groups in engine._offload._flat.values() for group in groups]
            history["pinned"].append(all(piece.is_pinned() for group in groups for _, piece in group._host._pieces))
            engine.to_device()
        history["logprobs"].append([column.cpu() for column in trainee.logprobs()])
        history["updates"].append(trainee.update())
    history["state"] = [tensor.cpu() for tensor in trainee.state()]
    return history


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_it_had_stayed(tmp_path: Path, dtype: str) -> None:
    model = str(make_tiny_model(tmp_path, "qwen3", num_layers=4, hidden_size=256, head_dim=64, initializer_range=0.05))
    here = run_isolated(train, model, dtype, False, device="cuda")
    away = run_isolated(train, model, dtype, True, device="cuda")
    assert here["updates"] == away["updates"] and here["updates"][0]["grad_norm"] > 0
    assert all(map(torch.equal, here["state"], away["state"]))
    for mine, theirs in zip(here["logprobs"], away["logprobs"], strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert all(away["pinned"])
    assert away["freed"] == away["owned"]
