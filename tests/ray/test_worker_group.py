"""A call on a group of workers: who runs, what each is given, what comes back, and how failures read."""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from scalerl.batch import StepPlan, plan_step
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.batch import HeldRows, PlacedBatch, ShardedBatch
from scalerl.cluster.dispatch import WorkerMethod
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.processes import Processes
from scalerl.cluster.worker_group import Limit, WorkerGroup
from scalerl.errors import RunError, UserError
from scalerl.parallel.layout import Layout
from scalerl.tracking.metrics import Metric
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.sft_worker import SFTWorker
from scalerl.trainer.ranks.worker import MegatronWorker
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
    shards = tuple(
        ray.put(DataProto({"input_ids": Jagged.from_list([rows[row] for row in plan.rows(dp_rank)], torch.int64)}))
        for dp_rank in range(2)
    )
    samples = {"uid": np.arange(len(lengths)), "length": np.array(lengths)}
    return ShardedBatch(plan, samples, (shards,))


def test_rank_zero(group: WorkerGroup) -> None:
    assert group.call(PlainWorker.first, 1, two=[2]) == (0, (1,), {"two": [2]})


def test_one_to_all(group: WorkerGroup) -> None:
    """In rank order, and every rank joined at the address of rank 0."""
    assert group.call(PlainWorker.everyone, factor=3) == [
        (rank, 3 * rank, "hello", "address of rank 0") for rank in range(4)
    ]


@pytest.mark.parametrize(("num_bits", "num_objects"), [(80, 0), (80_000, 1)])
def test_what_all_ranks_get_is_sent_once_where_it_is_large(
    group: WorkerGroup, num_bits: int, num_objects: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: sizes.append(len(value)) or put(value))
    factor = 1 << num_bits
    assert [made for _, made, *_ in group.call(PlainWorker.everyone, factor=factor)] == [r * factor for r in range(4)]
    assert len(sizes) == num_objects and all(size > num_bits // 8 for size in sizes)


def test_only_registered_methods_are_called(group: WorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"^PlainWorker.not_registered carries no @register: a group cannot call it$"):
        group.call(PlainWorker.not_registered)
    with pytest.raises(TypeError, match=r"^MegatronWorker.memory: PlainWorker, which these ranks are, has no such"):
        group.call(MegatronWorker.memory)


def test_ranks_of_runs_of_any_kind_follow_one_another_in_one_process(start_group: Callable[..., WorkerGroup]) -> None:
    """Reinforcement learning, fine-tuning, and a class that knows no model: each has its own calls and no others'."""
    megatron = {"device": "cpu", "collective_timeout_s": 60.0, "seed": 1}
    processes = []
    for cls, other, init in (
        (RLWorker, SFTWorker.update_sft, megatron),
        (SFTWorker, RLWorker.update_actor, megatron),
        (PlainWorker, SFTWorker.update_sft, {"greeting": "hello"}),
    ):
        group = start_group(cls, Layout(1), **init)
        processes.append(group.ranks[0])
        with pytest.raises(TypeError, match=f"{cls.__name__}, which these ranks are, has no such method"):
            group.call(other, place(LENGTHS))
        if cls is PlainWorker:
            assert group.call(PlainWorker.first) == (0, (), {})
        else:
            assert "perf/cpu_memory_used_gb" in group.call(MegatronWorker.memory)[0]
        start_group.stop(group)
    assert processes == [processes[0]] * 3


def test_processes_that_wait_for_a_run_end_when_their_memory_is_needed(
    cluster: Processes, group: WorkerGroup, start_group: Callable[..., WorkerGroup]
) -> None:
    waiting = start_group(PlainWorker, Layout(1), greeting="hello")
    (process,) = waiting.ranks
    start_group.stop(waiting)
    ray.get(process.__ray_ready__.remote(), timeout=60)
    cluster.end_waiting()
    deadline = time.monotonic() + 60
    with pytest.raises(RayActorError):
        # One that is killed may still answer for a moment.
        while time.monotonic() < deadline:
            ray.get(process.__ray_ready__.remote(), timeout=60)
            time.sleep(0.1)
    assert len(group.call(PlainWorker.everyone, factor=1)) == 4
    again = start_group(PlainWorker, Layout(1), greeting="hello")
    assert again.call(PlainWorker.first) == (0, (), {})
    start_group.stop(again)


def test_a_registered_method_stays_a_method(group: WorkerGroup) -> None:
    worker = PlainWorker(3, LAYOUT, greeting="")
    assert worker.fail(0) == 3 and worker.first(1) == (3, (1,), {})


def test_many_ranks_are_waited_for_together_and_a_row_is_sent_once_per_data_parallel_rank(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks, for which four processes answer: four tensor-parallel ranks each of 16 data-parallel ones."""
    many = WorkerGroup.__new__(WorkerGroup)
    many.cls, many.layout = PlainWorker, Layout(64, 4)
    many.timeout_s, many.limits, many.failures = group.timeout_s, {}, group.failures
    many.ranks = [group.ranks[rank % 4] for rank in range(64)]
    plan = plan_step([1] * 32, dp_size=16, mini_batches=[range(32)], max_tokens_per_micro_batch=2)
    batch = ShardedBatch(plan, {"uid": np.arange(32)})
    waits, puts = [], []
    wait, put = ray.wait, ray.put

    def counting_wait(pending: list[Any], *, num_returns: int, timeout: float) -> Any:
        waits.append((len(pending), num_returns))
        return wait(pending, num_returns=num_returns, timeout=timeout)

    def counting_put(value: Any) -> Any:
        puts.append(value)
        return put(value)

    monkeypatch.setattr(ray, "wait", counting_wait)
    monkeypatch.setattr(ray, "put", counting_put)
    metrics = many.call(PlainWorker.count_rows, batch).get().metrics
    # Every tensor-parallel rank has the rows of its data-parallel one.
    assert metrics == {"rows": Metric(4 * 32.0, "sum", 64.0)}
    assert len(puts) == 16 and sorted(uid for shard in puts for uid in pickle.loads(shard)[1]["uid"]) == [*range(32)]
    assert all(pending == num_returns for pending, num_returns in waits) and len(waits) < 64


def test_every_rank_gets_its_shard(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    metrics, samples, columns = group.call(PlainWorker.see, batch)
    assert metrics == samples == {} and ray.get(columns) == [None, None]
    rows = rows_of(LENGTHS)
    for rank, seen in enumerate(group.call(PlainWorker.what_was_seen)):
        dp_rank = LAYOUT.coordinates(rank).dp_rank
        mine = list(batch.plan.rows(dp_rank))
        assert seen["uids"] == mine
        assert seen["tokens"] == {"input_ids": [rows[row] for row in mine]}
        # Positions in the shard stand for the rows of the plan.
        planned = [[list(micro) for micro in mini] for mini in batch.plan.micro_batches[dp_rank]]
        assert [[[mine[i] for i in micro] for micro in mini] for mini in seen["micro_batches"]] == planned


def test_columns_of_output_ranks_are_collected(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    metrics, samples, columns = group.call(PlainWorker.measure, batch, scale=3)
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
    # Sample columns in the batch's order, of the output ranks.
    ranks = {row: LAYOUT.output_ranks()[dp_rank] for dp_rank in range(2) for row in batch.plan.rows(dp_rank)}
    assert samples["twice"].tolist() == [2 * length for length in LENGTHS]
    assert samples["rank"].tolist() == [ranks[row] for row in range(len(LENGTHS))] and samples.keys() == {
        "twice",
        "rank",
    }


def test_collected_columns_reach_the_next_call(group: WorkerGroup) -> None:
    batch = place(LENGTHS)
    columns = group.call(PlainWorker.measure, batch, scale=7).columns
    group.call(PlainWorker.see, with_column(batch, columns))
    for rank, seen in enumerate(group.call(PlainWorker.what_was_seen)):
        assert seen["tokens"].keys() == {"input_ids", "scaled", "rank"}
        assert seen["tokens"]["scaled"] == [[7 * value for value in row] for row in seen["tokens"]["input_ids"]]
        assert {value for row in seen["tokens"]["rank"] for value in row} == {LAYOUT.coordinates(rank).dp_rank + 2}


def with_column(batch: ShardedBatch, shards: list[ray.ObjectRef]) -> ShardedBatch:
    return replace(batch, columns=(*batch.columns, tuple(shards)))


def test_columns_of_another_plan_reach_the_rows_of_this_one(group: WorkerGroup) -> None:
    """What one pool made on its own plan, read by ranks that hold other rows in another order."""
    made = place(LENGTHS)
    columns = group.call(PlainWorker.measure, made, scale=7).columns
    lengths = np.array(LENGTHS)
    plan = plan_step(
        LENGTHS, dp_size=2, mini_batches=[range(3), range(3, len(LENGTHS))], max_tokens_per_micro_batch=30,
        workload_S=1.0 / lengths,
    )  # fmt: skip
    assert [plan.rows(rank) for rank in range(2)] != [made.plan.rows(rank) for rank in range(2)]
    batch = PlacedBatch(made.samples, {"actor": made.plan, "critic": plan})
    batch = batch.with_column("ids", "actor", made.columns[0]).with_column("scaled", "actor", columns)
    group.call(PlainWorker.see, batch.shards("critic", "uid", "length", "ids", "scaled"))
    rows = rows_of(LENGTHS)
    for rank, seen in enumerate(group.call(PlainWorker.what_was_seen)):
        mine = list(plan.rows(LAYOUT.coordinates(rank).dp_rank))
        assert seen["uids"] == mine
        assert seen["tokens"]["input_ids"] == [rows[row] for row in mine]
        assert seen["tokens"]["scaled"] == [[7 * value for value in rows[row]] for row in mine]


def test_columns_with_shapes_of_their_own_reach_the_ranks(group: WorkerGroup) -> None:
    """Two numbers of each token, and rows of other lengths than those of the tokens, under the plan of another role."""
    made = place(LENGTHS)
    pairs = [[[value, -value] for value in row] for row in rows_of(LENGTHS)]
    patches = [[float(row)] * (row % 3) for row in range(len(LENGTHS))]

    def shard(rows: Sequence[int]) -> DataProto:
        columns = {"pairs": Jagged.from_list([pairs[row] for row in rows], torch.int64)}
        of_rows = [patches[row] for row in rows]
        return DataProto(columns | {"patches": Jagged.from_list(of_rows, torch.float32, per_token=False)})

    plan = plan_step(LENGTHS, dp_size=2, mini_batches=[range(len(LENGTHS))], max_tokens_per_micro_batch=30)
    batch = PlacedBatch(made.samples, {"actor": made.plan, "critic": plan}).with_column("ids", "actor", made.columns[0])
    batch = batch.with_column("own", "actor", [ray.put(shard(made.plan.rows(rank))) for rank in range(2)])
    group.call(PlainWorker.see, batch.shards("critic", "uid", "ids", "own"))
    for rank, seen in enumerate(group.call(PlainWorker.what_was_seen)):
        mine = plan.rows(LAYOUT.coordinates(rank).dp_rank)
        assert seen["tokens"]["pairs"] == [pairs[row] for row in mine]
        assert seen["tokens"]["patches"] == [patches[row] for row in mine]


def sent_through_the_driver(batch: ShardedBatch, fetched: list[Any]) -> int:
    """Bytes of a step's messages that the controller makes or holds: calls, results and its own batch."""
    calls = [
        (
            batch.plan.local_micro_batches(dp_rank),
            batch.shard_samples(dp_rank),
            {"scale": 3},
            [column[dp_rank] for column in batch.columns],
        )
        for dp_rank in range(2)
    ]
    return len(cloudpickle.dumps((calls, fetched, HeldRows(batch.samples), batch)))


def test_messages_do_not_grow_with_tokens(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, stored, fetch = {}, {}, ray.get
    fetched: list[Any] = []

    def seen_fetch(refs: Any) -> Any:
        fetched.append(fetch(refs))
        return fetched[-1]

    monkeypatch.setattr(ray, "get", seen_fetch)
    # Above the 100 KB up to which Ray keeps a result inside its reference.
    for scale in (4000, 16_000):
        batch = place([length * scale for length in LENGTHS], 8 * scale)
        fetched.clear()
        columns = group.call(PlainWorker.measure, batch, scale=3).columns
        assert any("longest" in repr(values) for values in fetched), "no call was seen to fetch"
        sizes[scale] = sent_through_the_driver(with_column(batch, columns), fetched)
        stored[scale] = sum(fetch(column).tokens["scaled"].values.nbytes for column in columns)
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
    small, large = (sent_through_the_driver(batch, []) for batch in batches)
    assert large > small + 800 * 8


# --- dispatch modes of one's own, and calls that nobody waits for ---


def test_an_own_mode_deals_out_and_collects(group: WorkerGroup) -> None:
    rows = [1, 20, 300, 4000, 50_000]
    assert group.call(PlainWorker.weigh, rows, weight=2) == {"ranks": [0, 1, 2, 3], "sum": 108_642, "of": 4}
    assert group.call(PlainWorker.weigh, [])["sum"] == 0, "the default of dispatch_fn"


def test_an_own_mode_on_rank_zero(group: WorkerGroup) -> None:
    assert group.call(PlainWorker.rank_and, 7) == 14
    assert group.call(PlainWorker.lead) == 0


def test_what_is_wrong_with_an_own_mode_names_its_function(group: WorkerGroup) -> None:
    made = (
        r"^weigh_too_few: argument 0 that tests.ray.workers.deal_to_one_rank_too_few made is 3 values; give a list of"
    )
    with pytest.raises(ValueError, match=made):
        group.call(PlainWorker.weigh_too_few, [1])
    with pytest.raises(LookupError, match="collected nothing"):
        group.call(PlainWorker.weigh_in_vain, [1])


def test_a_call_that_does_not_wait(group: WorkerGroup, tmp_path: Path) -> None:
    """The ranks stay in it until the file is there, which is made after the call and those after it."""
    release, batch = tmp_path / "release", place(LENGTHS)
    waiting = group.call(PlainWorker.wait_for, str(release))
    counted = group.call(PlainWorker.count_rows, batch)
    weighed = group.call(PlainWorker.weigh_later, [1, 2, 3, 4], weight=3)
    release.touch()
    assert weighed.get()["sum"] == 30
    assert counted.get().metrics["rows"].value == 2 * len(LENGTHS)
    assert waiting.get() == waiting.get() == [0, 1, 2, 3]


def test_a_call_that_does_not_wait_fails_when_it_is_waited_for(group: WorkerGroup) -> None:
    failing = group.call(PlainWorker.fail_later, 2)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"fail_later failed on rank 2 .*: no such number"):
            failing.get()


def test_calls_beside_a_failed_one_keep_their_answers(group: WorkerGroup) -> None:
    """The step ends with the error of one pass: the answers of the others are read by nobody, or by who asked."""
    before = group.call(PlainWorker.weigh_later, [1, 2, 3, 4], weight=3)
    failing = group.call(PlainWorker.fail_later, 1)
    after = group.call(PlainWorker.count_rows, place(LENGTHS))
    with pytest.raises(WorkerError, match=r"fail_later failed on rank 1 .*: no such number"):
        failing.get()
    del after
    assert group.call(PlainWorker.weigh_later, [5], weight=1).get()["sum"] == 5
    assert group.call(PlainWorker.first, 1) == (0, (1,), {})
    assert before.get()["sum"] == 30


# --- failures. Those that end a rank come last: each has a group of its own ---


@pytest.mark.parametrize("rank", [0, 3])
def test_an_exception(group: WorkerGroup, rank: int) -> None:
    at = LAYOUT.coordinates(rank)
    with pytest.raises(WorkerError, match=f"fail failed on rank {rank} ") as error:
        group.call(PlainWorker.fail, rank)
    message = str(error.value)
    # The cause first, then where it was raised, then what the rank wrote.
    assert message.startswith(f"fail failed on rank {rank} ({at}): no such number\n")
    assert "ArithmeticError" in message and "in fail" in message
    assert "Last lines of its stderr, the whole is " in message and message.endswith(f"  | rank {rank} fails")
    assert group.call(PlainWorker.first) == (0, (), {}), "the group is of no use after an exception"


def test_a_users_error_stays_one(group: WorkerGroup) -> None:
    with pytest.raises(UserError, match=r"refuse failed on rank \d \(.*\): rows.parquet: row 3: no prompt$") as error:
        group.call(PlainWorker.refuse)
    assert not isinstance(error.value, RunError)


def test_a_full_disk_is_no_reason_for_other_ranks(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"cannot_write failed on rank \d \(.*\): no space left$") as error:
        group.call(PlainWorker.cannot_write)
    assert not error.value.restart_helps
    with pytest.raises(WorkerError) as error:
        group.call(PlainWorker.fail, 0)
    assert error.value.restart_helps


def test_an_exception_on_a_shard(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"fail_on_shard failed on rank 2 \(.*pp_rank=1.*\): no such number"):
        group.call(PlainWorker.fail_on_shard, place(LENGTHS), rank=2)


def test_ray_adds_no_stack_of_its_own(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks' errors, which nobody asks for once the first is raised."""
    printed: list[Exception] = []
    monkeypatch.setattr(ray._private.worker, "_unhandled_error_handler", printed.append)
    with pytest.raises(WorkerError):
        group.call(PlainWorker.fail_everywhere)
    # The other ranks have answered too, and nothing holds their answers.
    assert group.call(PlainWorker.everyone, factor=1)
    gc.collect()
    assert printed == []


def test_an_unknown_argument(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"measure failed on rank \d .*unexpected keyword argument 'size'"):
        group.call(PlainWorker.measure, place(LENGTHS), size=3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (PlainWorker.die, r"(?s)die: the process of rank 1 \(.*dp_rank=1.*\) died: .*  \| about to die$"),
        (
            PlainWorker.hang,
            r"(?s)hang: ranks \[1\] did not answer within trainer.save_timeout_s=10 s; .*  \| about to hang$",
        ),
    ],
)
def test_a_rank_that_does_not_answer(
    start_group: Callable[..., WorkerGroup], method: WorkerMethod, message: str
) -> None:
    lost = start_group(PlainWorker, Layout(2), greeting="")
    assert lost.call(method, -1) == [0, 1]
    # A method may have a limit of its own, which the message names.
    lost.limits = {"hang": Limit("trainer.save_timeout_s", 10.0)}
    with pytest.raises(WorkerError, match=message) as error:
        lost.call(method, 1)
    start_group.stop(lost, failed=error.value)


def test_plan_has_every_row_once() -> None:
    """The fixture of this file: both ranks have rows."""
    plan: StepPlan = plan_step(LENGTHS, dp_size=2, mini_batches=[range(6)], max_tokens_per_micro_batch=8)
    assert sorted([*plan.rows(0), *plan.rows(1)]) == list(range(6)) and plan.rows(0) and plan.rows(1)
