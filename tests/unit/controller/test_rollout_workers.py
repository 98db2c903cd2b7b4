"""Groups, servers and rows shared by several rollout workers: what the driver holds is what one worker would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.balance import StepPlan
from scalerl.cluster.batch import BatchRef, HeldRows
from scalerl.controller.sampling.early_ends import EarlyEnds
from scalerl.controller.sampling.groups import Enough, SampleGroup
from scalerl.controller.sampling.rollout_workers import (
    RANKS_PER_CALL,
    RolloutWorkers,
    default_num_workers,
    merged,
    share_servers,
)
from scalerl.controller.sampling.scoring import GroupScores
from scalerl.controller.sampling.worker import TRAINED_COLUMNS, Generated, RolloutWorker
from scalerl.protocol import DataProto, Jagged

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

    def join(self, parts: list[tuple[int, list[int]]]) -> int:
        rows = [self.batches[batch_id][row] for batch_id, of_batch in parts for row in of_batch]
        for batch_id, _ in parts:
            self.drop(batch_id)
        self.batches[100] = rows
        return 100

    def drop(self, batch_id: int) -> None:
        del self.batches[batch_id]

    def texts(self, batch_id: int, rows: list[int], dataset: str, with_special_tokens: bool) -> list[Any]:
        return [self.batches[batch_id][row] for row in rows]


class Here(RolloutWorkers):
    """Without Ray."""

    def __init__(self, num_servers: int, num_workers: int) -> None:
        shares = share_servers(num_servers, num_workers)
        self.servers, self.handles = shares, [Worker() for _ in shares]
        self.owner_of_server = [worker for worker, mine in enumerate(shares) for _ in mine]

    def ask(self, worker: int, method: str, *args: Any) -> Any:
        return getattr(self.handles[worker], method)(*args)

    def generate(self, groups: list[SampleGroup], finished: set[int], batch_id: int) -> tuple[Generated, HeldRows]:
        made = {}
        for worker, mine in self.dealt(groups).items():
            whole = [group for group in mine if group.uid in finished]
            uids = np.array([group.uid for group in whole for _ in range(N)])
            names = np.empty(len(uids), dtype=object)
            names[:] = [(group.uid, index) for group in whole for index in range(N)]
            self.handles[worker].batches[batch_id] = list(names)
            left = [group for group in mine if group.uid not in finished]
            samples = {"uid": uids, "name": names}
            made[worker] = Generated(batch_id, samples, 0.0, float(worker), 1, [], left)
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
    found = []
    for num_workers in {1, data.draw(st.integers(1, num_servers)), num_servers}:
        workers, parts, seen = Here(num_servers, num_workers), [], []
        for number, (groups, finished) in enumerate(rounds):
            generated, held = workers.generate(groups, finished, number)
            part = BatchRef(held, generated.samples)
            assert workers.texts(part, range(len(part)), "train", True) == generated.samples["name"].tolist()
            assert len(part) == 0 or part.samples["uid"].dtype == np.int64
            seen.append((generated.samples["name"].tolist(), generated.unfinished))
            parts.append((part, [row for row in range(len(part)) if row % 3]))
        joined = workers.join(parts)
        names = joined.samples["name"].tolist()
        assert workers.texts(joined, range(len(joined)), "train", True) == names
        assert sum(len(rows) for worker in workers.handles for rows in worker.batches.values()) == len(names)
        workers.drop(joined)
        assert all(worker.batches == {} for worker in workers.handles)
        found.append((seen, names))
    assert all(one == found[0] for one in found)


class Holder:
    """Of a worker: its own methods that hand tokens out, called at once, and how often they were."""

    def __init__(self) -> None:
        self.worker = object.__new__(RolloutWorker)
        self.worker.batches = {}
        self.calls: Counter[str] = Counter()
        self.cut, self.deal = (self._method(name) for name in ("cut", "deal"))

    def _method(self, name: str) -> SimpleNamespace:
        def remote(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self.worker, name)(*args)

        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=remote))


def ids(rows: Sequence[int]) -> DataProto:
    """Token columns of the step's rows: row 3 has three tokens 3."""
    column = Jagged.from_list([torch.full((row,), row) for row in rows], torch.int64)
    return DataProto(dict.fromkeys((*TRAINED_COLUMNS, "policy_versions"), column))


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
    fragments = workers.tokens(HeldRows(tuple(batches), batch_S, row_S), plan)
    assert len(fragments) == dp_size
    for dp_rank, fragment in enumerate(fragments):
        assert list(fragment.tokens) == list(TRAINED_COLUMNS)
        assert [row.tolist() for row in fragment.tokens["input_ids"]] == [[row] * row for row in plan.rows(dp_rank)]


@pytest.mark.parametrize(("num_workers", "cuts", "deals"), [(1, [13], [0]), (4, [4] * 4, [4, 3, 3, 3])])
def test_calls_for_tokens_do_not_grow_with_the_workers(num_workers: int, cuts: list[int], deals: list[int]) -> None:
    """200 ranks with two rows each, 16 ranks at a time."""
    dp_size = 12 * RANKS_PER_CALL + 8
    plan = StepPlan(tuple((((2 * rank, 2 * rank + 1),),) for rank in range(dp_size)), (1,))
    workers = Here(num_workers, num_workers)
    workers.handles = [Holder() for _ in range(num_workers)]
    for worker, handle in enumerate(workers.handles):
        handle.worker.batches[0] = ids([1] * len(range(worker, 2 * dp_size, num_workers)))
    row_S = np.arange(2 * dp_size)
    held = HeldRows(tuple((worker, 0) for worker in range(num_workers)), row_S % num_workers, row_S // num_workers)
    assert len(workers.tokens(held, plan)) == dp_size
    assert [handle.calls["cut"] for handle in workers.handles] == cuts
    assert [handle.calls["deal"] for handle in workers.handles] == deals


def test_a_group_comes_to_the_same_worker_again_and_all_have_their_share() -> None:
    workers = Here(8, 4)
    groups = [SampleGroup(uid, 5, position) for position, uid in enumerate(range(100, 164))]
    dealt = workers.dealt(groups)
    assert Counter({worker: len(mine) for worker, mine in dealt.items()}) == dict.fromkeys(range(4), 16)
    assert workers.dealt(groups[3:4]) == {workers.owner(groups[3]): [groups[3]]}
    assert workers.dealt([]) == {0: []}


class Handle:
    """Of a worker, whose calls arrive at once."""

    def __init__(self, ends: EarlyEnds) -> None:
        self.count_kept = self.Method(ends.count)
        self.end_early = self.Method(ends.over.add)

    class Method:
        def __init__(self, call: Any) -> None:
            self.remote = call


@pytest.mark.parametrize("num_kept", [(3, 2), (0, 5), (5, 0), (1, 1)])
def test_groups_of_all_workers_end_a_generation(num_kept: tuple[int, int]) -> None:
    scores = [GroupScores(1, None, Enough(5)) for _ in num_kept]
    ends = [EarlyEnds(number, []) for number in range(2)]
    handles = [Handle(end) for end in ends]
    for end in ends:
        end.workers = handles
    assert not any(end.is_over(3, own) for end, own in zip(ends, scores, strict=True))
    for own, count in zip(scores, num_kept, strict=True):
        own.kept = set(range(count))
    [end.is_over(3, own) for end, own in zip(ends, scores, strict=True)]
    over = [end.is_over(3, own) for end, own in zip(ends, scores, strict=True)]
    assert over == [sum(num_kept) >= 5] * 2
    assert not any(end.is_over(4, GroupScores(1, None, Enough(5))) for end in ends), "another generation"
    for end in ends:
        end.forget(3)
        assert end.over == set()
