"""What the controller holds of a batch: metadata and references, placed by the plan."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.balance import StepPlan, plan_step
from scalerl.controller.batch import BatchRef, ShardedBatch
from scalerl.controller.trainer_roles import loss_totals

PROMPT_LENGTHS = np.array([4, 4, 7, 7, 3, 3, 5, 5])
RESPONSE_LENGTHS = np.array([9, 1, 0, 6, 12, 2, 8, 8])


def samples() -> dict[str, np.ndarray]:
    names = np.empty(8, dtype=object)
    names[:] = list("abcdefgh")
    return {
        "uid": np.repeat(np.arange(4), 2),
        "prompt_length": PROMPT_LENGTHS,
        "response_length": RESPONSE_LENGTHS,
        "name": names,
    }


@pytest.fixture
def plan() -> StepPlan:
    return plan_step(
        PROMPT_LENGTHS + RESPONSE_LENGTHS,
        dp_size=2,
        mini_batches=[range(4), range(4, 8)],
        max_tokens_per_micro_batch=20,
    )


def test_batch_ref_counts_tokens() -> None:
    batch = BatchRef(5, samples())
    assert len(batch) == 8
    assert batch.num_tokens_S.tolist() == [13, 5, 7, 13, 15, 5, 13, 13]


def test_shards_follow_the_plan(plan: StepPlan) -> None:
    batch = ShardedBatch(plan, samples(), ((), ()))
    shards = [batch.shard_samples(dp_rank) for dp_rank in range(2)]
    for dp_rank, shard in enumerate(shards):
        assert shard["name"].tolist() == ["abcdefgh"[row] for row in plan.rows(dp_rank)]
        assert shard["response_length"].tolist() == [RESPONSE_LENGTHS[row] for row in plan.rows(dp_rank)]
    assert sorted(name for shard in shards for name in shard["name"]) == list("abcdefgh")


def test_columns_are_added_per_rank(plan: StepPlan) -> None:
    first = ShardedBatch(plan, samples(), (("ids 0",), ("ids 1",)))
    second = first.with_columns(["old 0", "old 1"])
    assert second.columns == (("ids 0", "old 0"), ("ids 1", "old 1"))
    assert first.columns == (("ids 0",), ("ids 1",)), "the batch before was changed"
    with pytest.raises(ValueError):
        first.with_columns(["old 0"])


def test_samples_are_added(plan: StepPlan) -> None:
    first = ShardedBatch(plan, samples(), ((), ()))
    second = first.with_samples(advantages=np.arange(8.0))
    assert second.shard_samples(1)["advantages"].tolist() == [float(row) for row in plan.rows(1)]
    assert "advantages" not in first.samples


def test_loss_totals_are_of_the_whole_mini_batch(plan: StepPlan) -> None:
    """By hand: rows 0..3 have 9 + 1 + 0 + 6 response tokens in 3 samples that have any."""
    totals = loss_totals(ShardedBatch(plan, samples(), ((), ())))
    assert totals == [{"num_loss_tokens": 16, "num_sequences": 3}, {"num_loss_tokens": 30, "num_sequences": 4}]


def test_loss_totals_do_not_depend_on_the_layout() -> None:
    rows = [range(4), range(4, 8)]
    lengths = PROMPT_LENGTHS + RESPONSE_LENGTHS
    totals = [
        loss_totals(
            ShardedBatch(
                plan_step(lengths, dp_size=dp_size, mini_batches=rows, max_tokens_per_micro_batch=cap),
                samples(),
                ((),) * dp_size,
            )
        )
        for dp_size, cap in ((1, 15), (1, 200), (2, 30), (4, 15))
    ]
    assert all(found == totals[0] for found in totals)
