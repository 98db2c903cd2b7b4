"""Data-parallel ranks exchange the gradients of an update once, in its last micro-batch, however many it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.tiny_models import make_tiny_model

# Small, so that there are several buckets.
BUCKET_SIZE = 5000
MICRO_BATCHES = (2, 4, 1, 4)


def exchanged(model: str, distributed_optimizer: bool, overlap: bool) -> list[list[tuple[int, int]]]:
    """Of each update of MICRO_BATCHES: (micro-batches that had a loss by then, numbers) of every exchange."""
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    from tests.dist.trainee import Trainee

    ddp = {"overlap_grad_reduce": overlap, "bucket_size": BUCKET_SIZE}
    trainee = Trainee(model, (1, 1, 2), use_distributed_optimizer=distributed_optimizer, override_ddp_config=ddp)
    module: Any = param_and_grad_buffer if distributed_optimizer else torch.distributed
    name = "dist_reduce_scatter_func" if distributed_optimizer else "all_reduce"
    real, num_losses = getattr(module, name), 0
    exchanges: list[tuple[int, int]] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        size = args[1 if distributed_optimizer else 0].numel()
        # Sums over all ranks of single numbers, such as the norm, are no exchange of gradients.
        if size > 100:
            exchanges.append((num_losses, size))
        return real(*args, **kwargs)

    def loss(*args: Any) -> Any:
        nonlocal num_losses
        num_losses += 1
        return trainee.loss(*args)

    setattr(module, name, counting)
    try:
        of_updates = []
        for count in MICRO_BATCHES:
            trainee.micro_batches = [range(4)[start::count] for start in range(count)]
            num_losses = 0
            exchanges.clear()
            trainee.update(loss)
            of_updates.append(list(exchanges))
        return of_updates
    finally:
        setattr(module, name, real)


def trained(model: str) -> list[list[Any]]:
    """With and without overlap: gradient norms, weights and log-probs of updates after which all leaves the device."""
    from tests.dist.trainee import Trainee

    runs = []
    for ddp in ({}, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": BUCKET_SIZE}):
        trainee = Trainee(model, (1, 1, 2), override_ddp_config=ddp)
        numbers: list[Any] = []
        for _ in range(2):
            numbers.append(torch.tensor(trainee.update()["grad_norm"]))
            # As after a step of the hybrid engine: what leaves, comes back and is sent are the weights of the update.
            trainee.engine.to_host()
            trainee.engine.to_device()
            numbers += [*trainee.weights().values(), *trainee.logprobs()]
        # A skipped update changes nothing, whichever way gradients and parameters take.
        trainee.factor = float("nan")
        assert trainee.update()["skipped_updates"] == 1
        trainee.engine.to_host("params")
        trainee.engine.to_device()
        runs.append([*numbers, *trainee.weights().values()])
    return runs


def test_overlap_with_parts_that_leave_the_device(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3")
    for plain, overlapped in run_ranks(2, trained, str(model)):
        assert len(plain) == len(overlapped) > 20
        for expected, tensor in zip(plain, overlapped, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
        assert plain[0] > 0


@pytest.mark.parametrize("distributed_optimizer", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_once_for_an_update_in_its_last_micro_batch(tmp_path: Path, distributed_optimizer: bool, overlap: bool) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3")
    for updates in run_ranks(2, exchanged, str(model), distributed_optimizer, overlap):
        first = [size for _, size in updates[0]]
        assert (len(first) > 2) == overlap
        for count, exchanges in zip(MICRO_BATCHES, updates, strict=True):
            assert sorted(size for _, size in exchanges) == sorted(first)
            assert {done for done, _ in exchanges} == {count}
