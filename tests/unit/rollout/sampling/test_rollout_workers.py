"""Groups, servers and rows shared by several rollout workers: what the driver holds is what one worker would have."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.batch import StepPlan, plan_step
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.batch import HeldRows, PlacedBatch, TokenColumn
from scalerl.rollout.sampling.dump import even_ranges
from scalerl.rollout.sampling.groups import EarlyEnd, EarlyEndCount, GroupScores, SampleGroup
from scalerl.rollout.sampling.held_batches import APART
from scalerl.rollout.sampling.rollout import Finished, merged
from scalerl.rollout.sampling.rollout_workers import (
    MAX_DUMP_FILES,
    RANKS_PER_CALL,
    RolloutWorkers,
    default_num_workers,
    share_servers,
)
from scalerl.rollout.sampling.worker import GeneratedBatch, RolloutWorker

N = 2


@given(st.integers(1, 40), st.data())
def test_servers_are_shared_evenly_by_neighbours(num_servers: int, data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, num_servers))
    shares = share_servers(num_servers, num_workers)
    assert [server for mine in shares for server in mine] == list(range(num_servers))
    sizes = [len(mine) for mine in shares]
    assert len(sizes) == num_workers and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_eight_servers_have_one_worker() -> None:
    assert [default_num_workers(count) for count in (1, 8, 9, 16, 17, 64)] == [1, 1, 2, 2, 3, 8]


class Worker:
    """In this process: batches of rows, which are named by what they are."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}
        self.told: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        attribute = object.__getattribute__(self, name)
        return SimpleNamespace(remote=attribute) if inspect.ismethod(attribute) else attribute

    def join(self, parts: list[tuple[int, list[int]]]) -> int:
        rows = [self.batches[batch_id][row] for batch_id, of_batch in parts for row in of_batch]
        for batch_id, _ in parts:
            self.drop.remote(batch_id)
        self.batches[100] = rows
        return 100

    def drop(self, batch_id: int) -> None:
        del self.batches[batch_id]

    def texts(self, batch_id: int, rows: list[int], dataset: str, with_special_tokens: bool) -> list[Any]:
        return [self.batches[batch_id][row] for row in rows]

    def forget(self, uids: list[int]) -> None:
        self.told.append(("forget", uids))

    def replace(self, successors: dict[int, str]) -> None:
        self.told.append(("replace", successors))

    def in_service(self, indices: list[int]) -> None:
        self.told.append(("in_service", indices))


class Here(RolloutWorkers):
    """Without Ray. waits: what was waited for, and how many calls at a time."""

    def __init__(self, num_servers: int, num_workers: int) -> None:
        shares = share_servers(num_servers, num_workers)
        self.servers, self.handles = shares, [Worker() for _ in shares]
        self.owner_of_server = [worker for worker, mine in enumerate(shares) for _ in mine]
        self.waits: list[tuple[str, int]] = []

    def _values(self, what: str, calls: list[Any]) -> list[Any]:
        self.waits.append((what, len(calls)))
        return calls

    def generate(self, groups: list[SampleGroup], finished: set[int], batch_id: int) -> Finished:
        made = {}
        for worker, mine in self.dealt(groups).items():
            whole = [group for group in mine if group.uid in finished]
            uids = np.array([group.uid for group in whole for _ in range(N)])
            names = np.empty(len(uids), dtype=object)
            names[:] = [(group.uid, index) for group in whole for index in range(N)]
            self.handles[worker].batches[batch_id] = list(names)
            left = [group for group in mine if group.uid not in finished]
            samples = {"uid": uids, "name": names}
            made[worker] = GeneratedBatch(batch_id, samples, float(worker), 1, [], left)
        return merged(groups, made)


GROUPS = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True).map(
    lambda positions: [SampleGroup(3, 2**20, position) for position in positions]
)


@given(GROUPS, GROUPS, st.integers(1, 6), st.data())
def test_any_number_of_workers_gives_the_rows_of_one(
    first: list[SampleGroup], second: list[SampleGroup], num_servers: int, data: st.DataObject
) -> None:
    """Two rounds, of each the finished groups, joined as dynamic sampling does; cut for ranks."""
    second = [SampleGroup(3, 2**20 + 1, group.position) for group in second]
    rounds = [(groups, set(data.draw(st.sets(st.sampled_from([g.uid for g in groups]))))) for groups in (first, second)]
    outcomes = []
    for num_workers in {1, data.draw(st.integers(1, num_servers)), num_servers}:
        workers, batches, seen = Here(num_servers, num_workers), [], []
        for number, (groups, finished) in enumerate(rounds):
            result = workers.generate(groups, finished, number)
            held = result.samples
            assert workers.texts(held, range(len(held)), "train", True) == held.samples["name"].tolist()
            assert len(held) == 0 or held.samples["uid"].dtype == np.int64
            seen.append((held.samples["name"].tolist(), result.unfinished))
            batches.append((held, [row for row in range(len(held)) if row % 3]))
        joined = workers.join(batches)
        names = joined.samples["name"].tolist()
        assert workers.texts(joined, range(len(joined)), "train", True) == names
        assert sum(len(rows) for worker in workers.handles for rows in worker.batches.values()) == len(names)
        workers.drop(joined)
        assert all(worker.batches == {} for worker in workers.handles)
        outcomes.append((seen, names))
    assert all(one == outcomes[0] for one in outcomes)


def test_workers_are_asked_side_by_side() -> None:
    """Each call of all four is made before one is waited for."""
    workers, groups = Here(8, 4), [SampleGroup(uid, 5, position) for position, uid in enumerate(range(100, 116))]
    first = workers.generate(groups, {group.uid for group in groups}, 1).samples
    second = workers.generate(groups, {group.uid for group in groups}, 2).samples
    # Rows of the second round from one worker alone: the batches of the others go.
    joined = workers.join([(first, range(32)), (second, [0, 1])])
    workers.texts(joined, range(34), "train", True)
    workers.drop(joined)
    workers.forget(groups)
    workers.replace({index: f"server {index}" for index in range(8)})
    workers.in_service(range(8))
    assert workers.waits == [
        *(("drop", 3), ("join", 4), ("texts", 4), ("drop", 4)),
        *(("forget", 4), ("replace", 4), ("in_service", 4)),
    ]
    assert workers.handles[1].told == [
        ("forget", [group.uid for group in groups if group.position % 8 in (2, 3)]),
        ("replace", {2: "server 2", 3: "server 3"}),
        ("in_service", [2, 3]),
    ]


TRAINED_COLUMNS = ("input_ids", "response_mask", "rollout_logprobs")


class Holder:
    """Of a worker: its own methods that hand tokens out, called at once. calls: how often they were; returned: objects
    that they returned; fetched: rows of other processes' objects among their arguments."""

    def __init__(self) -> None:
        self.worker = object.__new__(RolloutWorker)
        self.worker.batches, self.worker.chat_options = {}, None
        self.worker.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
        self.calls, self.returned, self.fetched = Counter[str](), Counter[str](), Counter[str]()
        self.select, self.regroup, self.dump = (self._method(name) for name in ("select", "regroup", "dump"))

    def _method(self, name: str) -> SimpleNamespace:
        def remote(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.fetched[name] += sum(len(arg) for arg in args if isinstance(arg, DataProto))
            value = getattr(self.worker, name)(*args, **kwargs)
            return asyncio.run(value) if inspect.iscoroutine(value) else value

        def options(num_returns: int) -> SimpleNamespace:
            self.returned[name] += num_returns
            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options, remote=remote)


def ids(rows: Sequence[int]) -> DataProto:
    """Token columns of the step's rows: row 3 has three tokens 3."""
    column = Jagged.from_list([torch.full((row,), row) for row in rows], torch.int64)
    return DataProto(dict.fromkeys((*TRAINED_COLUMNS, *sorted(APART)), column))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 70), st.data())
def test_a_ranks_rows_come_from_whoever_holds_them(num_workers: int, dp_size: int, data: st.DataObject) -> None:
    """Also where a worker holds several batches."""
    num_rows = data.draw(st.integers(dp_size, 3 * dp_size))
    batches = [(worker, 7 + number) for worker in range(num_workers) for number in range(data.draw(st.integers(1, 2)))]
    batch_S = np.array(data.draw(st.lists(st.integers(0, len(batches) - 1), min_size=num_rows, max_size=num_rows)))
    workers, row_S = Here(num_workers, num_workers), np.zeros(num_rows, np.int64)
    workers.handles = [Holder() for _ in range(num_workers)]
    for batch, (worker, batch_id) in enumerate(batches):
        rows = data.draw(st.permutations(np.flatnonzero(batch_S == batch).tolist()))
        row_S[rows] = np.arange(len(rows))
        workers.handles[worker].worker.batches[batch_id] = ids(rows)
    order = data.draw(st.permutations(range(num_rows)))
    plan = StepPlan(tuple(((tuple(order[rank::dp_size]),),) for rank in range(dp_size)), (1,))
    shards = workers.shards(HeldRows({}, tuple(batches), batch_S, row_S), plan)
    assert len(shards) == dp_size
    for dp_rank, shard in enumerate(shards):
        assert list(shard.tokens) == list(TRAINED_COLUMNS)
        assert [row.tolist() for row in shard.tokens["input_ids"]] == [[row] * row for row in plan.rows(dp_rank)]
    # A column that ranks do not get with the others.
    for dp_rank, shard in enumerate(
        workers.shards(HeldRows({}, tuple(batches), batch_S, row_S), plan, "routed_experts")
    ):
        assert list(shard.tokens) == ["routed_experts"]
        assert [row.tolist() for row in shard.tokens["routed_experts"]] == [[row] * row for row in plan.rows(dp_rank)]


def holders(num_workers: int, num_rows: int) -> tuple[Here, HeldRows]:
    """Workers that hold the rows in turn, each with its number of tokens (at least one)."""
    workers = Here(num_workers, num_workers)
    workers.handles = [Holder() for _ in range(num_workers)]
    row_S = np.arange(num_rows)
    for worker, handle in enumerate(workers.handles):
        handle.worker.batches[0] = ids([1 + row % 5 for row in row_S[worker::num_workers].tolist()])
    batches = tuple((worker, 0) for worker in range(num_workers))
    return workers, HeldRows({}, batches, row_S % num_workers, row_S // num_workers)


def plan_of(dp_size: int, num_rows: int) -> StepPlan:
    """Neighbouring rows are on different ranks, so that a rank has rows of all parts of a batch."""
    return StepPlan(tuple(((tuple(range(rank, num_rows, dp_size)),),) for rank in range(dp_size)), (1,))


@pytest.mark.parametrize(("num_workers", "selects", "regroups"), [(1, [13], [0]), (4, [4] * 4, [4, 3, 3, 3])])
def test_calls_for_tokens_do_not_grow_with_the_workers(
    num_workers: int, selects: list[int], regroups: list[int]
) -> None:
    """200 ranks with two rows each, 16 ranks at a time."""
    dp_size = 12 * RANKS_PER_CALL + 8
    workers, held = holders(num_workers, 2 * dp_size)
    assert len(workers.shards(held, plan_of(dp_size, 2 * dp_size))) == dp_size
    assert [handle.calls["select"] for handle in workers.handles] == selects
    assert [handle.calls["regroup"] for handle in workers.handles] == regroups


def returned_for_shards(num_workers: int, dp_size: int) -> Counter[str]:
    """The objects that all workers return where each has two rows of any part of a batch, by method."""
    workers, held = holders(num_workers, 2 * dp_size)
    assert len(workers.shards(held, plan_of(dp_size, 2 * dp_size))) == dp_size
    return sum((handle.returned for handle in workers.handles), Counter[str]())


@pytest.mark.parametrize(("num_workers", "dp_size"), [(4, 256), (16, 256), (64, 256), (40, 100)])
def test_references_do_not_grow_with_ranks_times_workers(num_workers: int, dp_size: int) -> None:
    """The workers select no more objects than a quarter of the ranks (and one each); each rank gets one object."""
    returned = returned_for_shards(num_workers, dp_size)
    assert returned["select"] <= dp_size / 4 + num_workers
    assert returned["regroup"] == dp_size


def test_references_of_a_rank_do_not_grow_with_a_run() -> None:
    """A worker for every 64 ranks, as a run has: 4, 16 and 32 of them select as many objects for each rank."""
    sizes = [256, 1024, 2048]
    assert [default_num_workers(dp_size // 8) for dp_size in sizes] == [4, 16, 32]
    assert [returned_for_shards(dp_size // 64, dp_size)["select"] / dp_size for dp_size in sizes] == [0.25] * 3


def column_of(name: str, plan: StepPlan, lengths: Sequence[int]) -> TokenColumn:
    """A column whose tokens are the number of their row and a half."""
    ranks = [
        DataProto({name: Jagged.from_list([[row + 0.5] * lengths[row] for row in plan.rows(rank)], torch.float32)})
        for rank in range(plan.dp_size)
    ]
    return TokenColumn(plan, tuple(ranks))


@pytest.mark.parametrize(
    ("num_workers", "made_by", "wanted_by"), [(1, 2, 3), (1, 40, 20), (3, 40, 7), (3, 7, 40), (20, 64, 32)]
)
def test_a_column_is_resharded_for_another_plan(num_workers: int, made_by: int, wanted_by: int) -> None:
    """Of each shard nobody fetches more than its rows, twice, however many ranks have them."""
    num_rows = 3 * made_by * wanted_by
    lengths = [1 + row % 4 for row in range(num_rows)]
    workers, plan = Here(num_workers, num_workers), plan_of(wanted_by, num_rows)
    workers.handles = [Holder() for _ in range(num_workers)]
    made = plan_step(lengths, dp_size=made_by, mini_batches=[range(num_rows)], max_tokens_per_micro_batch=16)
    batch = PlacedBatch({}, {"actor": made, "critic": plan}, {}, reshard=workers.reshard)
    batch = replace(batch, columns={"values": column_of("values", made, lengths)})
    shards = batch.shards("critic", "values")
    for rank in range(wanted_by):
        (column,) = shards.columns
        assert [row.tolist() for row in column[rank].tokens["values"]] == [
            [row + 0.5] * lengths[row] for row in plan.rows(rank)
        ]
    assert sum(handle.fetched["regroup"] for handle in workers.handles) == 2 * num_rows
    calls = [handle.calls["regroup"] for handle in workers.handles]
    # A second pass of the role has the same objects, and the ranks that made the column are not asked anew.
    assert batch.shards("critic", "values").columns == shards.columns
    assert batch.shards("actor", "values").columns == (batch.columns["values"].shards,)
    assert [handle.calls["regroup"] for handle in workers.handles] == calls


@pytest.mark.parametrize("dp_size", [64, 256])
def test_references_of_another_plan_are_few(dp_size: int) -> None:
    workers, num_rows = Here(8, 8), 4 * dp_size
    workers.handles = [Holder() for _ in range(8)]
    made, wanted = plan_of(dp_size, num_rows), plan_of(dp_size // 2, num_rows)
    assert len(workers.reshard(column_of("x", made, [1] * num_rows), wanted)) == dp_size // 2
    between = (dp_size // RANKS_PER_CALL) * (dp_size // 2 // RANKS_PER_CALL)
    assert sum(handle.returned["regroup"] for handle in workers.handles) <= between + dp_size // 2 <= dp_size


@pytest.mark.parametrize(("num_workers", "dp_size", "num_rows"), [(1, 2, 6), (3, 2, 10), (4, 70, 210), (5, 3, 4)])
def test_a_worker_fetches_the_rows_of_its_file_of_a_dump(
    tmp_path: Path, num_workers: int, dp_size: int, num_rows: int
) -> None:
    """Of a column of the trainer each row goes once to a worker that regroups, and once to the one that writes it."""
    workers, held = holders(num_workers, num_rows)
    lengths = [1 + row % 5 for row in range(num_rows)]
    # The second column was made by fewer ranks, under another plan.
    plans = {"old_logprobs": plan_of(dp_size, num_rows), "values": plan_of(1, num_rows)}
    columns = [column_of(name, plan, lengths) for name, plan in plans.items()]
    ranges = even_ranges(num_rows, workers.num_dump_files)
    files = [tmp_path / f"part-{number}.parquet" for number in range(len(ranges))]
    samples = {"prompt_length": np.ones(num_rows, np.int64), "uid": np.arange(num_rows)}
    workers.dump(held, columns, samples, dict(zip(files, ranges, strict=True)))
    written = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["uid"] for row in written] == list(range(num_rows))
    for row, length in zip(written, lengths, strict=True):
        assert row["input_ids"] == row["policy_versions"] == [length] * length
        assert row["old_logprobs"] == row["values"] == [row["uid"] + 0.5] * length
        assert row["prompt"] == str(length)
    assert sum(handle.fetched["regroup"] for handle in workers.handles) == len(columns) * num_rows
    for number, (handle, rows) in enumerate(zip(workers.handles, ranges, strict=False)):
        of_others = sum(row % num_workers != number for row in rows)
        assert handle.fetched["dump"] == len(columns) * len(rows) + of_others
    assert [waited for waited in workers.waits if waited[0] == "dump"] == [("dump", len(ranges))]


@pytest.mark.parametrize(("num_workers", "dp_size"), [(4, 256), (16, 256), (80, 256)])
def test_references_of_a_dump_do_not_grow_with_ranks_times_workers(
    tmp_path: Path, num_workers: int, dp_size: int
) -> None:
    workers, held = holders(num_workers, 2 * dp_size)
    plan = plan_of(dp_size, 2 * dp_size)
    ranks = [
        DataProto({"x": ids([1 + row % 5 for row in plan.rows(rank)]).tokens["input_ids"]}) for rank in range(dp_size)
    ]
    ranges = even_ranges(2 * dp_size, workers.num_dump_files)
    files = {tmp_path / str(number): rows for number, rows in enumerate(ranges)}
    workers.dump(held, [TokenColumn(plan, tuple(ranks))], {"prompt_length": np.ones(2 * dp_size, np.int64)}, files)
    returned = [handle.returned for handle in workers.handles]
    assert sum(count["regroup"] for count in returned) <= dp_size + len(ranges)
    assert all(count["select"] <= min(num_workers, MAX_DUMP_FILES) for count in returned)


def test_a_group_comes_to_the_same_worker_again_and_all_have_their_share() -> None:
    workers = Here(8, 4)
    groups = [SampleGroup(uid, 5, position) for position, uid in enumerate(range(100, 164))]
    dealt = workers.dealt(groups)
    assert Counter({worker: len(mine) for worker, mine in dealt.items()}) == dict.fromkeys(range(4), 16)
    assert workers.dealt(groups[3:4]) == {workers.owner(groups[3]): [groups[3]]}
    assert workers.dealt([]) == {0: []}


class Handle:
    """Of a worker, whose calls arrive at once."""

    def __init__(self, ends: EarlyEndCount) -> None:
        self.count_kept = self.Method(ends.count)
        self.end_early = self.Method(ends.over.add)

    class Method:
        def __init__(self, call: Any) -> None:
            self.remote = call


@pytest.mark.parametrize("num_kept", [(3, 2), (0, 5), (5, 0), (1, 1)])
def test_groups_of_all_workers_end_a_generation(num_kept: tuple[int, int]) -> None:
    scores = [GroupScores(1, None, EarlyEnd(5)) for _ in num_kept]
    ends = [EarlyEndCount(number, []) for number in range(2)]
    handles = [Handle(end) for end in ends]
    for end in ends:
        end.workers = handles
    assert not any(end.is_over(3, own) for end, own in zip(ends, scores, strict=True))
    for own, count in zip(scores, num_kept, strict=True):
        own.kept = set(range(count))
    [end.is_over(3, own) for end, own in zip(ends, scores, strict=True)]
    over = [end.is_over(3, own) for end, own in zip(ends, scores, strict=True)]
    assert over == [sum(num_kept) >= 5] * 2
    assert not any(end.is_over(4, GroupScores(1, None, EarlyEnd(5))) for end in ends), "another generation"
    for end in ends:
        end.forget(3)
        assert end.over == set()
