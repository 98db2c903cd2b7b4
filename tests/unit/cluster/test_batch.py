"""What the controller holds of a batch: metadata and references, placed by the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scalerl.batch import StepPlan, plan_step
from scalerl.batch.columns import RESPONSE_LENGTH
from scalerl.cluster.batch import HeldRows, PlacedBatch, ShardedBatch, positions_by_label
from scalerl.trainer.ranks.roles import loss_totals

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


def test_held_rows_count_tokens() -> None:
    batch = HeldRows(samples())
    assert len(batch) == 8
    assert batch.num_tokens_S.tolist() == [13, 5, 7, 13, 15, 5, 13, 13]


def test_shards_follow_the_plan(plan: StepPlan) -> None:
    batch = ShardedBatch(plan, samples())
    shards = [batch.shard_samples(dp_rank) for dp_rank in range(2)]
    for dp_rank, shard in enumerate(shards):
        assert shard["name"].tolist() == ["abcdefgh"[row] for row in plan.rows(dp_rank)]
        assert shard["response_length"].tolist() == [RESPONSE_LENGTHS[row] for row in plan.rows(dp_rank)]
    assert sorted(name for shard in shards for name in shard["name"]) == list("abcdefgh")


class Counted(np.ndarray):
    """A column that counts how many of its values are picked by their rows. A slice picks none: it is a view."""

    picked = 0

    def __getitem__(self, rows: Any) -> Any:
        if not isinstance(rows, slice):
            Counted.picked += np.size(rows)
        return np.asarray(self)[rows].view(Counted)


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_the_shards_of_a_column_are_made_by_one_pass(dp_size: int) -> None:
    plan = plan_step([1] * 64, dp_size=dp_size, mini_batches=[range(64)], max_tokens_per_micro_batch=20)
    batch, Counted.picked = ShardedBatch(plan, {"uid": np.arange(64).view(Counted)}), 0
    shards = [batch.shard_samples(dp_rank)["uid"].tolist() for dp_rank in range(dp_size)]
    assert shards == [list(plan.rows(dp_rank)) for dp_rank in range(dp_size)]
    assert Counted.picked == 64


def test_rows_are_found_in_the_batches_that_have_them() -> None:
    """One worker has two batches, and one batch none of the rows."""
    batch_S = np.array([2, 0, 2, 3, 0, 2])
    held = HeldRows({}, ((0, 7), (0, 8), (1, 7), (2, 9)), batch_S, np.array([0, 0, 1, 0, 1, 2]))
    assert held.by_batch([5, 1, 3, 0, 4]) == [(0, 7, [0, 1], [1, 4]), (1, 7, [2, 0], [0, 3]), (2, 9, [0], [2])]
    assert held.by_batch([]) == [] and positions_by_label(np.array([], np.int64)) == []


def test_sample_columns_of_the_ranks_are_put_in_the_batchs_order(plan: StepPlan) -> None:
    batch = ShardedBatch(plan, samples())
    joined = batch.joined_samples([batch.shard_samples(dp_rank) for dp_rank in range(2)])
    assert {name: column.tolist() for name, column in joined.items()} == {
        name: column.tolist() for name, column in samples().items()
    }
    assert batch.joined_samples([{}, {}]) == {}


def test_columns_are_added_and_named(plan: StepPlan) -> None:
    first = PlacedBatch(samples(), {"actor": plan}).with_column("tokens", "actor", ["ids 0", "ids 1"])
    second = first.with_column("old", "actor", ["old 0", "old 1"])
    assert second.shards("actor", "old", "tokens").columns == (("old 0", "old 1"), ("ids 0", "ids 1"))
    assert list(first.columns) == ["tokens"], "the batch before was changed"
    with pytest.raises(AssertionError, match="1 shards, 2 ranks"):
        first.with_column("old", "actor", ["old 0"])
    with pytest.raises(KeyError, match="the batch has no values for actor; it has"):
        second.shards("actor", "values")


def test_samples_are_added(plan: StepPlan) -> None:
    first = PlacedBatch(samples(), {"actor": plan})
    second = first.with_samples(advantages=np.arange(8.0))
    assert second.shards("actor", "advantages").shard_samples(1)["advantages"].tolist() == [
        float(row) for row in plan.rows(1)
    ]
    assert "advantages" not in first.samples


def test_loss_totals_are_of_the_whole_mini_batch(plan: StepPlan) -> None:
    """By hand: rows 0..3 have 9 + 1 + 0 + 6 response tokens in 3 samples that have any."""
    totals = loss_totals(plan, samples(), RESPONSE_LENGTH)
    assert totals == [{"num_loss_tokens": 16, "num_sequences": 3}, {"num_loss_tokens": 30, "num_sequences": 4}]


def test_loss_totals_do_not_depend_on_the_layout() -> None:
    rows = [range(4), range(4, 8)]
    lengths = PROMPT_LENGTHS + RESPONSE_LENGTHS
    plans = [
        plan_step(lengths, dp_size=dp, mini_batches=rows, max_tokens_per_micro_batch=max_tokens_per_micro_batch)
        for dp, max_tokens_per_micro_batch in ((1, 15), (1, 200), (2, 30), (4, 15))
    ]
    totals = [loss_totals(plan, samples(), RESPONSE_LENGTH) for plan in plans]
    assert all(plan_totals == totals[0] for plan_totals in totals)


def test_an_episode_is_one_sequence_of_the_totals(plan: StepPlan) -> None:
    """Rows 0 to 2 are one sample's: 10 tokens of it, and row 3's. Rows 5 and 6 are one's too, 4 and 7 their own."""
    columns = samples() | {"uid": np.zeros(8, int), "sample_index": np.array([0, 0, 0, 1, 2, 3, 3, 4])}
    totals = loss_totals(plan, columns, RESPONSE_LENGTH)
    assert totals == [{"num_loss_tokens": 16, "num_sequences": 2}, {"num_loss_tokens": 30, "num_sequences": 3}]
