"""Adams of CUDA through the same code on a CPU: torch's fused one, and one with the rules of others (apex, TE).

Update, save, load, to the host and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    from scalerl.parallel.checkpoint import main_tensors

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
    from scalerl.parallel.restore import load_engine

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


class LazyAdam(torch.optim.Optimizer):
    """Adam by the rules of apex' and Transformer Engine's: no state before its first step, steps counted by group."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool,
        capturable: bool,
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            corrections = [1 - beta ** group["step"] for beta in group["betas"]]
            for parameter in group["params"]:
                state = self.state[parameter]
                if len(state) == 0:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                if parameter.grad is None:
                    continue
                state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - group["betas"][1])
                mean, square = (state[name] / by for name, by in zip(state, corrections, strict=True))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


@contextmanager
def another_adam() -> Iterator[None]:
    """LazyAdam in the place where megatron looks for that of Transformer Engine or apex."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimizer, "Adam", LazyAdam)
        patched.setattr(distrib_optimizer, "Adam", LazyAdam)
        patched.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        yield


def train_with_another(model: str, megatron: dict[str, Any], directory: str) -> Any:
    """A checkpoint before the first update and after the second, and two updates more; metrics and the last state."""
    from scalerl.parallel.checkpoint import save_engine

    with another_adam():
        trainee = Trainee(model, (1, 1, 2), **megatron)
        assert all(isinstance(part.optimizer, LazyAdam) for part in trainee.engine.optimizer.chained_optimizers)
        updates = []
        for step in range(2 * NUM_UPDATES):
            if step in (0, NUM_UPDATES):
                save_engine(trainee.engine, f"{directory}/{step}")
            trainee.engine.to_host()
            trainee.engine.to_device()
            updates.append(trainee.update())
        return updates, trainee.state()


def resume_with_another(model: str, megatron: dict[str, Any], directory: str, step: int) -> Any:
    from scalerl.parallel.restore import load_engine

    with another_adam():
        trainee = Trainee(model, (1, 1, 2), **megatron)
        load_engine(trainee.engine, f"{directory}/{step}")
        return [trainee.update() for _ in range(step, 2 * NUM_UPDATES)], trainee.state()


@pytest.mark.parametrize(("dtype", "distributed"), [("bfloat16", True), full("float32", False)])
def test_an_adam_that_is_not_torchs_goes_on_from_any_checkpoint(
    model: str, tmp_path: Path, dtype: str, distributed: bool
) -> None:
    """Also from one before its first update, where it would have no state."""
    megatron = {"dtype": dtype, "use_distributed_optimizer": distributed}
    whole = run_ranks(2, train_with_another, model, megatron, str(tmp_path))
    for step in (0, NUM_UPDATES):
        resumed = run_ranks(2, resume_with_another, model, megatron, str(tmp_path), step)
        for (updates, state), (others, other_state) in zip(whole, resumed, strict=True):
            assert updates[step:] == others
            assert len(state) == len(other_state) and all(map(torch.equal, state, other_state))
