"""A call on a group of workers: who runs, what each is given, what comes back, and how failures read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle

from scalerl.balance import StepPlan, plan_step
from scalerl.controller.batch import BatchRef, Column, ShardedBatch
from scalerl.controller.worker_group import WorkerError, WorkerGroup
from scalerl.metrics import Metric
from scalerl.parallel.layout import Layout
from scalerl.protocol import DataProto, Jagged
from tests.ray.workers import PlainWorker

# Two data-parallel ranks of two stages: ranks 0 and 1 are the first stage, 2 and 3 hold the results.
LAYOUT = Layout(4, 1, 2)
LENGTHS = [3, 5, 2, 4, 6, 1]


@pytest.fixture(scope="module")
def group(start_group: Callable[..., WorkerGroup]) -> WorkerGroup:
    return start_group(PlainWorker, LAYOUT, greeting="hello")


def rows_of(lengths: list[int]) -> list[list[int]]:
    return [[10 * row + place for place in range(length)] for row, length in enumerate(lengths)]


def place(lengths: list[int], max_tokens: int = 8) -> ShardedBatch:
    """A batch of rows with these lengths, its ids in the object store."""
    plan = plan_step(lengths, dp_size=2, mini_batches=[range(len(lengths))], max_tokens_per_micro_batch=max_tokens)
    rows = rows_of(lengths)
    fragments = tuple(
        ray.put(DataProto({"input_ids": Jagged.from_list([rows[row] for row in plan.rows(dp_rank)], torch.int64)}))
        for dp_rank in range(2)
    )
    samples = {"uid": np.arange(len(lengths)), "length": np.array(lengths)}
    return ShardedBatch(plan, samples, (Column(plan, fragments),))


def test_rank_zero(group: WorkerGroup) -> None:
    assert group.first(1, two=[2]) == (0, (1,), {"two": [2]})


def test_one_to_all(group: WorkerGroup) -> None:
    """In rank order, and every rank joined at the address of rank 0."""
    assert group.everyone(factor=3) == [(rank, 3 * rank, "hello", "address of rank 0") for rank in range(4)]


def test_only_registered_methods_are_the_groups(group: WorkerGroup) -> None:
    assert not hasattr(group, "not_registered") and not hasattr(group, "join")


def test_every_rank_gets_its_shard(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    metrics, columns = group.see(batch)
    assert metrics == {} and len(columns) == 2
    rows = rows_of(LENGTHS)
    for rank, seen in enumerate(group.what_was_seen()):
        dp_rank = LAYOUT.coordinates(rank).dp_rank
        mine = list(batch.plan.rows(dp_rank))
        assert seen["uids"] == mine
        assert seen["tokens"] == {"input_ids": [rows[row] for row in mine]}
        # Positions in the shard stand for the rows of the plan.
        planned = [[list(micro) for micro in mini] for mini in batch.plan.micro_batches[dp_rank]]
        assert [[[mine[i] for i in micro] for micro in mini] for mini in seen["micro_batches"]] == planned


def test_columns_of_output_ranks_are_collected(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    metrics, columns = group.measure(batch, scale=3)
    assert all(isinstance(column, ray.ObjectRef) for column in columns)
    rows = rows_of(LENGTHS)
    for dp_rank, column in enumerate(ray.get(columns)):
        assert set(column.tokens["rank"].values.tolist()) == {LAYOUT.output_ranks()[dp_rank]} == {dp_rank + 2}
        scaled = column.tokens["scaled"]
        assert [scaled[i].tolist() for i in range(len(scaled))] == [
            [3 * value for value in rows[row]] for row in batch.plan.rows(dp_rank)
        ]
    ids = [value for row in rows for value in row]
    # Sums and the token-weighted mean over both ranks of the last stage.
    assert metrics.keys() == {"num_tokens", "mean_id", "longest"}
    assert metrics["num_tokens"] == Metric(len(ids), "sum", 2.0)
    assert metrics["mean_id"].value == pytest.approx(np.mean(ids))
    assert metrics["longest"].value == max(LENGTHS)


def test_collected_columns_reach_the_next_call(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    _, columns = group.measure(batch, scale=7)
    group.see(with_column(batch, columns))
    for rank, seen in enumerate(group.what_was_seen()):
        assert seen["tokens"].keys() == {"input_ids", "scaled", "rank"}
        assert seen["tokens"]["scaled"] == [[7 * value for value in row] for row in seen["tokens"]["input_ids"]]
        assert {value for row in seen["tokens"]["rank"] for value in row} == {LAYOUT.coordinates(rank).dp_rank + 2}


def with_column(batch: ShardedBatch, fragments: list[ray.ObjectRef]) -> ShardedBatch:
    return replace(batch, columns=(*batch.columns, Column(batch.plan, tuple(fragments))))


def test_columns_of_another_plan_reach_the_rows_of_this_one(group: WorkerGroup) -> None:
    """What one pool made on its own plan, read by ranks that hold other rows in another order."""
    made = place(LENGTHS)
    _, columns = group.measure(made, scale=7)
    lengths = np.array(LENGTHS)
    plan = plan_step(
        LENGTHS, dp_size=2, mini_batches=[range(3), range(3, len(LENGTHS))], max_tokens_per_micro_batch=30,
        workload_S=1.0 / lengths,
    )  # fmt: skip
    assert [plan.rows(rank) for rank in range(2)] != [made.plan.rows(rank) for rank in range(2)]
    group.see(replace(with_column(made, columns), plan=plan))
    rows = rows_of(LENGTHS)
    for rank, seen in enumerate(group.what_was_seen()):
        mine = list(plan.rows(LAYOUT.coordinates(rank).dp_rank))
        assert seen["uids"] == mine
        assert seen["tokens"]["input_ids"] == [rows[row] for row in mine]
        assert seen["tokens"]["scaled"] == [[7 * value for value in rows[row]] for row in mine]


def sent_through_the_driver(batch: ShardedBatch, metrics: dict[str, Metric]) -> int:
    """Bytes of a step's messages that the controller makes or holds: calls, results and its own batch."""
    calls = [
        (batch.plan.local_micro_batches(dp_rank), batch.shard_samples(dp_rank), {"scale": 3}, batch.parts(dp_rank))
        for dp_rank in range(2)
    ]
    return len(cloudpickle.dumps((calls, metrics, BatchRef(0, batch.samples), batch)))


def test_messages_do_not_grow_with_tokens(group: WorkerGroup) -> None:
    sizes, stored = {}, {}
    # Above the 100 KB up to which Ray keeps a result inside its reference.
    for scale in (4000, 16_000):
        batch = place([length * scale for length in LENGTHS], 8 * scale)
        metrics, columns = group.measure(batch, scale=3)
        batch = with_column(batch, columns)
        sizes[scale] = sent_through_the_driver(batch, metrics)
        stored[scale] = sum(ray.get(column).tokens["scaled"].values.nbytes for column in columns)
    assert stored[16_000] == 4 * stored[4000] > 2_000_000
    # A few bytes: small integers are pickled shorter than large ones.
    assert abs(sizes[16_000] - sizes[4000]) < 100, sizes
    assert sizes[16_000] < 5000


def test_messages_grow_with_samples() -> None:
    """Else the measure above would see nothing."""
    plans = [
        plan_step([4] * count, dp_size=2, mini_batches=[range(count)], max_tokens_per_micro_batch=8)
        for count in (8, 800)
    ]
    batches = [ShardedBatch(plan, {"uid": np.arange(count)}) for plan, count in zip(plans, (8, 800), strict=True)]
    small, large = (sent_through_the_driver(batch, {}) for batch in batches)
    assert large > small + 800 * 8


# --- failures. Those that end a rank come last: each has a group of its own ---


@pytest.mark.parametrize("rank", [0, 3])
def test_an_exception(group: WorkerGroup, rank: int) -> None:
    at = LAYOUT.coordinates(rank)
    with pytest.raises(WorkerError, match=f"fail failed on rank {rank} ") as error:
        group.fail(rank)
    message = str(error.value)
    # The cause first, then where it was raised.
    assert message.startswith(f"fail failed on rank {rank} ({at}): no such number\n")
    assert "ArithmeticError" in message and "in fail" in message
    assert group.first() == (0, (), {}), "the group is of no use after an exception"


def test_an_exception_on_a_shard(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"fail_on_shard failed on rank 2 \(.*pp_rank=1.*\): no such number"):
        group.fail_on_shard(place(LENGTHS), rank=2)


def test_ray_adds_no_stack_of_its_own(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks' errors, which nobody asks for once the first is raised."""
    printed: list[Exception] = []
    monkeypatch.setattr(ray._private.worker, "_unhandled_error_handler", printed.append)
    with pytest.raises(WorkerError):
        group.fail_everywhere()
    # The other ranks have answered too, and nothing holds their answers.
    assert group.everyone(factor=1)
    gc.collect()
    assert printed == []


def test_an_unknown_argument(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"measure failed on rank \d .*unexpected keyword argument 'size'"):
        group.measure(place(LENGTHS), size=3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("die", r"die: the process of rank 1 \(.*dp_rank=1.*\) died: "),
        ("hang", r"hang: ranks \[1\] did not answer within trainer.timeout_s=3 s"),
    ],
)
def test_a_rank_that_does_not_answer(start_group: Callable[..., WorkerGroup], method: str, message: str) -> None:
    lost = start_group(PlainWorker, Layout(2), greeting="")
    assert getattr(lost, method)(-1) == [0, 1]
    lost.timeout_s = 3.0
    with pytest.raises(WorkerError, match=message):
        getattr(lost, method)(1)
    start_group.stop(lost)


def test_plan_has_every_row_once() -> None:
    """The fixture of this file: both ranks have rows."""
    plan: StepPlan = plan_step(LENGTHS, dp_size=2, mini_batches=[range(6)], max_tokens_per_micro_batch=8)
    assert sorted([*plan.rows(0), *plan.rows(1)]) == list(range(6)) and plan.rows(0) and plan.rows(1)
