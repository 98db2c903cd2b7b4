"""torch's fused Adam on CUDA: in use, as torch's other one in its numbers, whole again after a checkpoint and the host.

    pytest tests/gpu/test_fused_adam.py

On a CPU tests/dist/test_fused_adam.py runs the same kernel's CPU version through the same code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.trainee import Trainee
from tests.gpu.isolated import run_isolated
from tests.tiny_models import make_tiny_model

NUM_UPDATES = 2
KERNEL = "aten::_fused_adamw_"


def update(trainee: Trainee) -> tuple[float, bool]:
    """The update's gradient norm, and whether it ran the fused kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        metrics = trainee.update()
    return metrics["grad_norm"], any(event.key == KERNEL for event in profile.key_averages())


def use_usual_adam(optimizer: Any) -> None:
    """torch's other Adam, which counts its steps on the host."""
    from scalerl.parallel.optimizer import optimizer_parts

    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            group["fused"] = False
        for state in part.optimizer.state.values():
            state["step"] = state["step"].cpu()


def train(model: str, dtype: str, fused: bool, directory: str) -> dict[str, Any]:
    """Updates with the model on the host before each, a checkpoint, and what a new engine loads from it."""
    from scalerl.parallel.checkpoint import main_tensors, save_engine
    from scalerl.parallel.optimizer import optimizer_parts
    from scalerl.parallel.restore import load_engine

    trainee = Trainee(model, (1, 1, 1), dtype=dtype)
    if not fused:
        use_usual_adam(trainee.engine.optimizer)
    history: dict[str, Any] = {"updates": []}
    for _ in range(NUM_UPDATES):
        trainee.engine.to_host()
        trainee.engine.to_device()
        history["updates"].append(update(trainee))
        if "first" not in history:
            tensors = [tensors["param"] for _, _, tensors, _ in main_tensors(trainee.engine.optimizer)]
            history["first"] = [tensor.detach().cpu().clone() for tensor in tensors]
    history["saved"] = [tensor.cpu() for tensor in trainee.state()]
    save_engine(trainee.engine, directory)
    other = Trainee(model, (1, 1, 1), dtype=dtype)
    load_engine(other.engine, directory)
    history["loaded"] = [tensor.cpu() for tensor in other.state()]
    history["goes_on"] = update(other)
    history["steps"] = {
        (state["step"].device.type, float(state["step"]))
        for part in optimizer_parts(other.engine.optimizer)
        for state in part.optimizer.state.values()
    }
    return history


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_adam_on_cuda(tmp_path: Path, dtype: str) -> None:
    model = str(make_tiny_model(tmp_path, "qwen3", num_layers=4, hidden_size=256, head_dim=64, initializer_range=0.05))
    fused = run_isolated(train, model, dtype, True, str(tmp_path / "fused"), device="cuda")
    usual = run_isolated(train, model, dtype, False, str(tmp_path / "usual"), device="cuda")
    assert all(ran for _, ran in [*fused["updates"], fused["goes_on"]])
    assert not any(ran for _, ran in usual["updates"])
    assert all(map(torch.equal, fused["saved"], fused["loaded"]))
    assert fused["steps"] == {("cuda", float(NUM_UPDATES + 1))}
    # After one update from the same weights, each weight has moved by about the learning rate, 1e-3. Two backward
    # passes need not agree in the last bit on a GPU, and Adam makes a large part of a step of it where a gradient is
    # next to nothing: so the mean.
    distances = [float((a - b).abs().mean()) for a, b in zip(fused["first"], usual["first"], strict=True)]
    assert max(distances) < 1e-5, max(distances)
