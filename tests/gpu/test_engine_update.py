"""The engine on CUDA against the same engine on the CPU in float32: log-probs, losses and gradient norms of updates.

The bfloat16 bounds come from the engine in
bfloat16 on a CPU, whose distances from float32 on this model and seed stand beside them.

    python -m pytest tests/gpu/test_engine_update.py -q
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.isolated import run_isolated
from tests.tiny_models import make_tiny_model

LENGTHS = (9, 17, 5, 130, 30, 8, 64, 21)
NUM_UPDATES = 4
LEARNING_RATE = 1e-3
# About three times the distance of bfloat16 on a CPU: 0.016, 0.011 (nats); 0.0081, 0.012 (of the value).
BFLOAT16_BOUNDS = {"before": 0.05, "after": 0.035, "loss": 0.025, "norm": 0.036}


def train(model_path: str, dtype: str, moe_experts_impl: str = "torch") -> dict[str, Any]:
    """Runs alone in a process: log-probs, NUM_UPDATES supervised updates, log-probs again."""
    from scalerl.algorithms import SFTObjective
    from scalerl.batch import plan_step
    from scalerl.batch.data_proto import DataProto, Jagged
    from scalerl.config.schema import MegatronConfig, OptimConfig
    from scalerl.parallel import platform
    from scalerl.parallel.engine import MegatronEngine
    from scalerl.parallel.layout import Layout, initialize

    groups = initialize(Layout(1), backend=platform.backend(), timeout_s=120, seed=1)
    megatron = MegatronConfig(dtype=dtype, moe_experts_impl=moe_experts_impl)
    engine = MegatronEngine(model_path, megatron, groups, optim=OptimConfig(lr=LEARNING_RATE))
    generator = torch.Generator().manual_seed(3)
    shard = DataProto(
        {
            "input_ids": Jagged.from_list(
                [torch.randint(0, 500, (length,), generator=generator) for length in LENGTHS], torch.int64
            ),
            "response_mask": Jagged.from_list([torch.arange(length) >= 2 for length in LENGTHS], torch.bool),
        }
    )
    plan = plan_step(LENGTHS, dp_size=1, mini_batches=[range(len(LENGTHS))], max_tokens_per_micro_batch=160)
    rows = plan.rows(0)
    (micro_batches,) = plan.local_micro_batches(0)
    shard = shard.select(rows)
    before = engine.logprobs(shard, micro_batches, temperature=0.7)["logprobs"].values
    objective = SFTObjective(int(shard.tokens["response_mask"].values.sum()))
    updates = [engine.update(shard, micro_batches, objective, temperature=1.0) for _ in range(NUM_UPDATES)]
    after = engine.logprobs(shard, micro_batches, temperature=0.7)["logprobs"].values
    exported = {name: tensor.dtype for bucket in engine.export_buckets(1 << 20) for name, tensor in bucket}
    return {"before": before, "after": after, "updates": updates, "dtypes": set(map(str, exported.values()))}


def distances(actual: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Log-probs: mean absolute difference, nats. Losses and gradient norms: the largest relative difference."""

    def mean(name: str) -> float:
        return float((actual[name] - expected[name]).abs().mean())

    def largest(key: str) -> float:
        pairs = zip(actual["updates"], expected["updates"], strict=True)
        return max(abs(mine[key] - theirs[key]) / theirs[key] for mine, theirs in pairs)

    return {
        "before": mean("before"),
        "after": mean("after"),
        "loss": largest("train/loss"),
        "norm": largest("grad_norm"),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", num_layers=4, hidden_size=256, head_dim=64, initializer_range=0.05
    )


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, Any]:
    return run_isolated(train, str(model), "float32", device="cpu")


def assert_learned(outcome: dict[str, Any], below: float = 0.5) -> None:
    """Else both sides could agree on doing nothing.  below: the last loss, of the first."""
    losses = [update["train/loss"] for update in outcome["updates"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < below * losses[0]


def test_float32_on_cuda_gives_the_numbers_of_the_cpu(model: Path, reference: dict[str, Any]) -> None:
    """Without TF32 (torch's default) only the order of additions differs; Adam makes 1e-6 of a gradient 1e-4."""
    outcome = run_isolated(train, str(model), "float32", device="cuda")
    assert_learned(outcome)
    distance = distances(outcome, reference)
    assert (
        distance["before"] < 1e-5 and distance["loss"] < 1e-4 and distance["norm"] < 1e-3 and distance["after"] < 1e-3
    ), distance


def test_bfloat16_on_cuda_stays_near_float32_on_the_cpu(model: Path, reference: dict[str, Any]) -> None:
    outcome = run_isolated(train, str(model), "bfloat16", device="cuda")
    assert outcome["dtypes"] == {"torch.bfloat16"}
    assert_learned(outcome)
    distance = distances(outcome, reference)
    assert all(distance[name] < bound for name, bound in BFLOAT16_BOUNDS.items()), distance
