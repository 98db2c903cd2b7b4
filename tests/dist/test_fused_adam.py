"""torch's fused Adam, the one of CUDA, through the same code on a CPU: update, save, load, to the host and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.trainee import Trainee
from tests.lanes import full
from tests.tiny_models import make_tiny_model

NUM_UPDATES = 2
KERNEL = "aten::_fused_adamw_"
# (dtype, use_distributed_optimizer)
CASES = [("bfloat16", True), ("float32", True), full(("bfloat16", False)), full(("float32", False))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", initializer_range=0.1))


def make_trainee(model: str, megatron: dict[str, Any], fused: bool) -> Trainee:
    from scalerl.parallel.optimizer import use_fused_adam

    trainee = Trainee(model, (1, 1, 2), **megatron)
    if fused:
        use_fused_adam(trainee.engine.optimizer)
    return trainee


def update(trainee: Trainee) -> tuple[dict[str, float], bool]:
    """The update's metrics, and whether it ran the fused kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        metrics = trainee.update()
    return metrics, any(event.key == KERNEL for event in profile.key_averages())


def main_parameters(trainee: Trainee) -> list[torch.Tensor]:
    from scalerl.parallel.optimizer import main_tensors

    return [tensors["param"].detach().clone() for _, _, tensors, _ in main_tensors(trainee.engine.optimizer)]


def train(model: str, megatron: dict[str, Any], fused: bool, directory: str) -> Any:
    """Two updates, a checkpoint, and two more, with the model on the host before each.

    Returns each update's metrics, how far it is from the begin by each main parameter, and the last state.
    """
    from scalerl.parallel.checkpoint import save_engine

    trainee = make_trainee(model, megatron, fused)
    begin = main_parameters(trainee)
    updates, moves = [], []
    for step in range(2 * NUM_UPDATES):
        trainee.engine.to_host()
        trainee.engine.to_device()
        updates.append(update(trainee))
        moves.append([now - before for now, before in zip(main_parameters(trainee), begin, strict=True)])
        if step + 1 == NUM_UPDATES:
            save_engine(trainee.engine, directory)
    return updates, moves, trainee.state()


def resume(model: str, megatron: dict[str, Any], fused: bool, directory: str) -> Any:
    """A new engine that loads the checkpoint, and its two updates."""
    from scalerl.parallel.checkpoint import load_engine

    trainee = make_trainee(model, megatron, fused)
    load_engine(trainee.engine, directory)
    return [update(trainee) for _ in range(NUM_UPDATES)], trainee.state()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'distributed' if case[1] else 'whole'}")
def fused_run(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(fields of MegatronConfig, directory of the checkpoint, what each rank of `train` returned)"""
    dtype, distributed = request.param
    megatron = {"dtype": dtype, "use_distributed_optimizer": distributed}
    directory = str(tmp_path_factory.mktemp("fused"))
    return megatron, directory, run_ranks(2, train, model, megatron, True, directory)


def test_a_run_goes_on_bitwise_from_its_checkpoint(model: str, fused_run: Any) -> None:
    megatron, directory, whole = fused_run
    resumed = run_ranks(2, resume, model, megatron, True, directory)
    for (updates, _, state), (others, other_state) in zip(whole, resumed, strict=True):
        assert all(ran for _, ran in updates + others)
        assert updates[NUM_UPDATES:] == others
        assert all(map(torch.equal, state, other_state))


def test_the_numbers_are_those_of_the_usual_adam(model: str, fused_run: Any, tmp_path: Path) -> None:
    """All updates in float32; with bfloat16 the first, after which a weight that rounds the other way changes more."""
    megatron, _, fused = fused_run
    usual = run_ranks(2, train, model, megatron, False, str(tmp_path))
    num_compared = 2 * NUM_UPDATES if megatron["dtype"] == "float32" else 1
    for (updates, moves, _), (others, other_moves, _) in zip(fused, usual, strict=True):
        assert all(ran for _, ran in updates) and not any(ran for _, ran in others)
        for moved, expected in zip(moves[:num_compared], other_moves[:num_compared], strict=True):
            assert max(float((a - b).abs().max()) for a, b in zip(moved, expected, strict=True)) < 1e-6
            # By about the learning rate in each update.
            assert max(float(tensor.abs().max()) for tensor in moved) > 5e-4
