"""`RolloutWorkers`: on the driver, which rollout worker has which servers and groups, and calls to the workers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from scalerl.cluster.batch import HeldRows, TokenColumn, positions_by_label
from scalerl.cluster.failures import WorkerError, values_of
from scalerl.cluster.pools import PooledActor
from scalerl.cluster.worker_group import LEAVE_TIMEOUT_S

if TYPE_CHECKING:
    from scalerl.batch import StepPlan
    from scalerl.rollout.sampling.groups import SampleGroup
    from scalerl.rollout.servers.client import ClientSettings, Replica
    from scalerl.rollout.servers.recovery import LostServer

T = TypeVar("T")

# Servers per worker where rollout.num_workers is not set.
SERVERS_PER_WORKER = 8
# Data-parallel ranks whose tokens a worker selects or regroups at a time: so many are in its memory twice. More where
# there are more workers, since each worker makes an object for every so many ranks: these objects are a quarter of the
# ranks then, however many there are of both. With eight ranks for a server and SERVERS_PER_WORKER that is reached from
# 4 workers and 256 ranks on, and always 16 workers put tokens together: 64 ranks each of 1,024, 256 of 4,096.
RANKS_PER_CALL = 16
RANKS_PER_CALL_AND_WORKER = 4
# Files of a dump: each worker makes an object for every file.
MAX_DUMP_FILES = 64


def default_num_workers(num_servers: int) -> int:
    return -(-num_servers // SERVERS_PER_WORKER)


def share_servers(num_servers: int, num_workers: int) -> list[range]:
    """Indices of each worker's servers: neighbours, on one node as far as can be.  num_workers: at most num_servers."""
    bounds = [worker * num_servers // num_workers for worker in range(num_workers + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


class RolloutWorkers:
    """The rollout workers of a run.

    Groups are dealt over the servers by their position in the step, and each worker has those of its servers: a group
    that is continued returns to its worker, and each worker has a share of any batch.
    """

    def __init__(self, processes: Sequence[PooledActor], servers: Sequence[range], timeout_s: float) -> None:
        """Takes worker processes that may still be starting.  servers[i]: indices of the servers of processes[i]."""
        self.processes, self.servers, self.timeout_s = list(processes), list(servers), timeout_s
        self.handles: list[Any] = [process.actor for process in processes]
        self.owner_of_server = [worker for worker, mine in enumerate(self.servers) for _ in mine]
        # Pending report of lost servers -> the worker that reports.
        self.news: dict[ray.ObjectRef, int] = {}

    def __len__(self) -> int:
        return len(self.handles)

    def wait_ready(self) -> None:
        self._values("start", [process.ready for process in self.processes])

    def owner(self, group: SampleGroup) -> int:
        return self.owner_of_server[group.position % len(self.owner_of_server)]

    def dealt(self, groups: Sequence[SampleGroup]) -> dict[int, list[SampleGroup]]:
        """Deals the groups to the workers: worker -> its groups, in order.

        Workers without a group are left out, but the first one if there is no group at all.
        """
        groups_of: dict[int, list[SampleGroup]] = {}
        for group in groups:
            groups_of.setdefault(self.owner(group), []).append(group)
        return dict(sorted(groups_of.items())) or {0: []}

    # --- servers ---

    def connect(self, replicas: Sequence[Replica], clients: ClientSettings, seed: int) -> None:
        calls = [
            handle.connect.remote(replicas, clients, seed, servers=list(mine), workers=self.handles, number=number)
            for number, (handle, mine) in enumerate(zip(self.handles, self.servers, strict=True))
        ]
        self._values("connect", calls)
        self.news = {handle.next_lost.remote(): worker for worker, handle in enumerate(self.handles)}

    def read_news(self, told: ray.ObjectRef) -> list[LostServer]:
        """Waits for a report in `news`, and returns the servers that it names."""
        worker = self.news.pop(told)
        (lost,) = values_of("generation", [told], self.timeout_s)
        self.news[self.handles[worker].next_lost.remote()] = worker
        return lost

    def news_so_far(self) -> list[LostServer]:
        if not self.news:
            return []
        told, _ = ray.wait(list(self.news), num_returns=len(self.news), timeout=0)
        return [server for news in told for server in self.read_news(news)]

    def replace(self, successors: Mapping[int, Replica]) -> None:
        """Tells workers of restarted servers; no generation uses these before `in_service`."""
        mine = self._by_owner(successors)
        self._ask("replace", [(worker, {index: successors[index] for index in mine[worker]}) for worker in mine])

    def in_service(self, indices: Sequence[int]) -> None:
        """Tells workers that restarted servers have the trainer's weights: generations that wait for them continue."""
        self._ask("in_service", list(self._by_owner(indices).items()))

    def _by_owner(self, indices: Sequence[int] | Mapping[int, Any]) -> dict[int, list[int]]:
        indices_of: dict[int, list[int]] = {}
        for index in indices:
            indices_of.setdefault(self.owner_of_server[index], []).append(index)
        return indices_of

    # --- what they hold ---

    def forget(self, groups: Sequence[SampleGroup]) -> None:
        """Drops the unfinished samples of interrupted groups that will not be asked for again."""
        mine = self.dealt(groups)
        self._ask("forget", [(worker, [group.uid for group in mine[worker]]) for worker in mine])

    def join(self, batches: Sequence[tuple[HeldRows, Sequence[int]]]) -> HeldRows:
        """Joins rows of several batches, in order, into one; the batches themselves are dropped."""
        asked: dict[int, list[tuple[int, list[int]]]] = {}
        sizes: dict[int, int] = {}
        workers, rows, dropped = [], [], []
        for held, wanted in batches:
            worker_R, row_R = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
            unused = set(held.batches)
            for worker, batch_id, rows_of_batch, positions in held.by_batch(wanted):
                asked.setdefault(worker, []).append((batch_id, rows_of_batch))
                unused.discard((worker, batch_id))
                first = sizes.get(worker, 0)
                sizes[worker] = first + len(rows_of_batch)
                worker_R[positions] = worker
                row_R[positions] = np.arange(first, first + len(rows_of_batch))
            dropped += sorted(unused)
            workers.append(worker_R)
            rows.append(row_R)
        self._ask("drop", dropped)
        by_worker = sorted(asked.items())
        joined = tuple(zip((worker for worker, _ in by_worker), self._ask("join", by_worker), strict=True))
        batch_of = {worker: index for index, (worker, _) in enumerate(joined)}
        batch_S = np.array([batch_of[worker] for worker in np.concatenate(workers).tolist()], dtype=np.int64)
        samples = {
            name: np.concatenate([held.samples[name][list(wanted)] for held, wanted in batches])
            for name in batches[0][0].samples
        }
        return HeldRows(samples, joined, batch_S, np.concatenate(rows))

    def shards(self, held: HeldRows, plan: StepPlan, column: str | None = None) -> list[ray.ObjectRef]:
        """References to the token columns of each data-parallel rank's rows, in the plan's order.

        column: as `HeldBatches.select`.
        With several workers each selects its rows for a group of ranks, and one of them, another worker for each group,
        regroups these rows by rank. So a rank gets one object, and neither calls nor references are as many as ranks
        times workers.
        """
        rows_of = [plan.rows(dp_rank) for dp_rank in range(plan.dp_size)]
        if len(held.batches) == 1:
            ((worker, batch_id),) = held.batches
            wanted = [(batch_id, held.row_S[list(rows)].tolist()) for rows in rows_of]
            some_each = _split(wanted, RANKS_PER_CALL)
            return [ref for some in some_each for ref in self._select(worker, some, column=column)]
        groups = _split(rows_of, self._ranks_per_call)
        return [ref for some in _split(groups, len(self)) for ref in self._shards_of_groups(held, some, column)]

    def _shards_of_groups(
        self, held: HeldRows, groups: Sequence[Sequence[Sequence[int]]], column: str | None
    ) -> list[ray.ObjectRef]:
        """References to the token columns of each rank. groups: [at most one for each worker][rank] -> rows."""
        wanted: dict[int, list[tuple[int, list[int]]]] = {}
        # Of each group: worker, which of the objects that it makes, and the positions of its rows in the group.
        sources: list[list[tuple[int, int, list[int]]]] = []
        for group in groups:
            sources.append([])
            for worker, batch_id, rows, positions in held.by_batch([row for of_rank in group for row in of_rank]):
                mine = wanted.setdefault(worker, [])
                sources[-1].append((worker, len(mine), positions))
                mine.append((batch_id, rows))
        selected = {worker: self._select(worker, mine, column=column) for worker, mine in sorted(wanted.items())}
        refs = []
        for number, (group, of_group) in enumerate(zip(groups, sources, strict=True)):
            # Where the rows of the group are in the selected objects, joined.
            order = np.argsort(np.concatenate([positions for _, _, positions in of_group]))
            ends = np.cumsum([len(rows) for rows in group])
            objects = [selected[worker][index] for worker, index, _ in of_group]
            refs += self._regroup(number, np.split(order, ends[:-1]), objects)
        return refs

    @property
    def _ranks_per_call(self) -> int:
        return max(RANKS_PER_CALL, RANKS_PER_CALL_AND_WORKER * len(self))

    def _select(self, worker: int, wanted: Sequence[tuple[int, list[int]]], **columns: Any) -> list[ray.ObjectRef]:
        """columns: as `HeldBatches.select`."""
        selected = self.handles[worker].select.options(num_returns=len(wanted)).remote(wanted, **columns)
        return selected if len(wanted) > 1 else [selected]

    def _regroup(
        self, worker: int, groups: Sequence[np.ndarray], columns: Sequence[ray.ObjectRef]
    ) -> list[ray.ObjectRef]:
        regroup = self.handles[worker].regroup.options(num_returns=len(groups))
        made = regroup.remote([positions.tolist() for positions in groups], *columns)
        return made if len(groups) > 1 else [made]

    def dump(
        self,
        held: HeldRows,
        made: Sequence[TokenColumn],
        samples: Mapping[str, np.ndarray],
        files: Mapping[Path, range],
    ) -> None:
        """Writes rows of a step's batch, as `RolloutWorker.dump`; each worker at most one file, and fetches no others.

        made: token columns of the trainer.  samples: sample columns of the whole batch.
        files: file -> its rows, in their order; at most `num_dump_files`.
        """
        ranges = list(files.values())
        # Of each file: (batch of its worker, rows of it, which rows of the step they are).
        own: list[list[tuple[int, list[int], np.ndarray]]] = [[] for _ in ranges]
        # Of each file, what others have: (which rows of the step, reference to their token columns).
        others: list[list[tuple[np.ndarray, ray.ObjectRef]]] = [[] for _ in ranges]
        wanted: dict[int, list[tuple[int, list[int]]]] = {}
        wanted_for: dict[int, list[tuple[int, np.ndarray]]] = {}
        for number, of_file in enumerate(ranges):
            for worker, batch_id, rows, positions in held.by_batch(of_file):
                step_rows = of_file.start + np.array(positions)
                if worker == number:
                    own[number].append((batch_id, rows, step_rows))
                else:
                    wanted.setdefault(worker, []).append((batch_id, rows))
                    wanted_for.setdefault(worker, []).append((number, step_rows))
        for worker, mine in wanted.items():
            selected = self._select(worker, mine, all_columns=True)
            for (number, step_rows), ref in zip(wanted_for[worker], selected, strict=True):
                others[number].append((step_rows, ref))
        file_S = np.repeat(np.arange(len(ranges)), [len(of_file) for of_file in ranges])
        for column in made:
            for number, step_rows, ref in self._by_label(column, file_S, self._ranks_per_call):
                others[number].append((step_rows, ref))
        calls = []
        for number, (file, of_file) in enumerate(files.items()):
            columns = {name: column[of_file.start : of_file.stop] for name, column in samples.items()}
            rows, refs = [rows for rows, _ in others[number]], [ref for _, ref in others[number]]
            calls.append(self.handles[number].dump.remote(str(file), columns, own[number], rows, *refs))
        self._values("dump", calls)

    @property
    def num_dump_files(self) -> int:
        return min(len(self), MAX_DUMP_FILES)

    def reshard(self, column: TokenColumn, plan: StepPlan) -> list[ray.ObjectRef]:
        """The shards of a token column under another plan: a reference for each of its data-parallel ranks.

        A rank's rows are in nearly all shards of the column. So workers regroup these shards for groups of ranks, and
        then the rows of each group for its ranks: each rank gets one object, and nobody a row that it does not need.
        """
        position_S, size = np.argsort(plan.rows_by_rank), self._ranks_per_call
        firsts = list(range(0, plan.dp_size, size))
        group_S = np.searchsorted([plan.starts[rank] for rank in firsts], position_S, side="right") - 1
        # Of each group: (which rows of the step, reference to the column's values of them).
        of_groups: list[list[tuple[np.ndarray, ray.ObjectRef]]] = [[] for _ in firsts]
        for group, rows, ref in self._by_label(column, group_S, size):
            of_groups[group].append((rows, ref))
        refs = []
        for group, first in enumerate(firsts):
            starts = plan.starts[first : first + size + 1]
            order = np.argsort(position_S[np.concatenate([rows for rows, _ in of_groups[group]])])
            by_rank = np.split(order, [start - starts[0] for start in starts[1:-1]])
            refs += self._regroup(group % len(self), by_rank, [ref for _, ref in of_groups[group]])
        return refs

    def _by_label(
        self, column: TokenColumn, label_S: np.ndarray, ranks_per_call: int
    ) -> list[tuple[int, np.ndarray, ray.ObjectRef]]:
        """Has workers regroup a column by label: (label, rows of the step, reference to their values), several for a
        label.

        Each worker takes the shards of some ranks, and makes one object of these for each label.
        """
        made = []
        for number, ranks in enumerate(_split(range(column.plan.dp_size), ranks_per_call)):
            rows = np.concatenate([column.plan.rows(dp_rank) for dp_rank in ranks])
            by_label = positions_by_label(label_S[rows])
            shards = [column.shards[dp_rank] for dp_rank in ranks]
            refs = self._regroup(number % len(self), [positions for _, positions in by_label], shards)
            made += [(label, rows[positions], ref) for (label, positions), ref in zip(by_label, refs, strict=True)]
        return made

    def drop(self, samples: HeldRows) -> None:
        self._ask("drop", samples.batches)

    def texts(
        self, samples: HeldRows, rows: Sequence[int], dataset: str, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """The texts of these rows, as `RolloutWorker.texts`."""
        batches = samples.by_batch(rows)
        asked = [(worker, batch_id, mine, dataset, with_special_tokens) for worker, batch_id, mine, _ in batches]
        text_of: dict[int, tuple[str, str, str]] = {}
        for (*_, positions), texts in zip(batches, self._ask("texts", asked), strict=True):
            text_of |= dict(zip(positions, texts, strict=True))
        return [text_of[position] for position in range(len(text_of))]

    # --- calls ---

    def _ask(self, method: str, asked: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method for each (worker, *arguments), side by side, and waits for the values."""
        return self._values(method, [getattr(self.handles[worker], method).remote(*args) for worker, *args in asked])

    def _values(self, what: str, calls: list[ray.ObjectRef]) -> list[Any]:
        return values_of(f"rollout worker {what}", calls, self.timeout_s)

    def leave(self) -> None:
        """Makes the workers leave the run. Raises WorkerError, or their error, where one fails or hangs."""
        # Not the limit of a call, which is long: the next start of the run may be waiting.
        calls = [handle.leave.remote() for handle in self.handles]
        _, late = ray.wait(calls, num_returns=len(calls), timeout=LEAVE_TIMEOUT_S)
        if late:
            workers = [worker for worker, call in enumerate(calls) if call in late]
            raise WorkerError(f"rollout workers {workers} did not leave within {LEAVE_TIMEOUT_S:.0f} s")
        values_of("rollout worker leave", calls, LEAVE_TIMEOUT_S)

    def stop(self) -> None:
        for handle in self.handles:
            ray.kill(handle)


def _split(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in groups of that size, the last one perhaps smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
