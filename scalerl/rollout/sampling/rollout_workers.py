"""`RolloutWorkers`: on the driver, which rollout worker has which servers and groups, and calls to the workers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from scalerl.cluster.ask import values_of
from scalerl.cluster.batch import BatchRef, HeldRows, TokenColumn, places_by_label
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.pools import PooledActor
from scalerl.cluster.worker_group import LEAVE_TIMEOUT_S

if TYPE_CHECKING:
    from scalerl.batch import StepPlan
    from scalerl.rollout.sampling.groups import SampleGroup
    from scalerl.rollout.sampling.worker import GeneratedBatch
    from scalerl.rollout.servers.recovery import LostServer
    from scalerl.rollout.servers.replica import ClientSettings, Replica

T = TypeVar("T")

# Servers per worker where rollout.num_workers is not set.
SERVERS_PER_WORKER = 8
# Data-parallel ranks whose tokens a worker cuts or puts together at a time: so many are in its memory twice. More where
# there are more workers, since each of them makes an object of every so many ranks: these objects are a quarter of the
# ranks then, however many there are of both. With eight ranks for a server and SERVERS_PER_WORKER that is reached from
# 4 workers and 256 ranks on, and always 16 workers put tokens together: 64 ranks each of 1,024, 256 of 4,096.
RANKS_PER_CALL = 16
RANKS_PER_CALL_AND_WORKER = 4
# Parts of a dump: each worker makes an object of every part.
MAX_DUMP_PARTS = 64


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

    def join(self, parts: Sequence[tuple[BatchRef, Sequence[int]]]) -> BatchRef:
        """Joins rows of several batches, in order, into one; the batches themselves are dropped."""
        asked: dict[int, list[tuple[int, list[int]]]] = {}
        sizes: dict[int, int] = {}
        workers, rows, dropped = [], [], []
        for part, wanted in parts:
            worker_R, row_R = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.int64)
            unused = set(part.held.batches)
            for piece in part.held.pieces(wanted):
                asked.setdefault(piece.worker, []).append((piece.batch_id, piece.rows))
                unused.discard((piece.worker, piece.batch_id))
                first = sizes.get(piece.worker, 0)
                sizes[piece.worker] = first + len(piece.rows)
                worker_R[piece.places] = piece.worker
                row_R[piece.places] = np.arange(first, first + len(piece.rows))
            dropped += sorted(unused)
            workers.append(worker_R)
            rows.append(row_R)
        self._ask("drop", dropped)
        joined = sorted(asked.items())
        batches = tuple(zip((worker for worker, _ in joined), self._ask("join", joined), strict=True))
        batch_of = {worker: index for index, (worker, _) in enumerate(batches)}
        batch_S = np.array([batch_of[worker] for worker in np.concatenate(workers).tolist()], dtype=np.int64)
        columns = {
            name: np.concatenate([part.samples[name][list(wanted)] for part, wanted in parts])
            for name in parts[0][0].samples
        }
        return BatchRef(HeldRows(batches, batch_S, np.concatenate(rows)), columns)

    def tokens(self, held: HeldRows, plan: StepPlan) -> list[ray.ObjectRef]:
        """References to the token columns of each data-parallel rank's rows, in the plan's order."""
        ranks = [plan.rows(dp_rank) for dp_rank in range(plan.dp_size)]
        if len(held.batches) == 1:
            ((worker, batch_id),) = held.batches
            cuts = [(batch_id, held.row_S[list(rows)].tolist()) for rows in ranks]
            return [ref for some in _split(cuts, RANKS_PER_CALL) for ref in self._cut(worker, some)]
        chunks = _split(ranks, self._ranks_per_call)
        return [ref for some in _split(chunks, len(self)) for ref in self._exchanged(held, some)]

    def _exchanged(self, held: HeldRows, chunks: Sequence[Sequence[Sequence[int]]]) -> list[ray.ObjectRef]:
        """References to the token columns of the rows of each rank. chunks: [one for each worker at most][rank][row].

        Each worker cuts its rows of a whole chunk, and one of them, another for each chunk, puts these together for its
        ranks. So a rank gets one object, and neither calls nor references are as many as ranks times workers.
        """
        cuts: dict[int, list[tuple[int, list[int]]]] = {}
        # Of each chunk: worker, which of its cuts, and the places of its rows in the chunk.
        sources: list[list[tuple[int, int, list[int]]]] = []
        for chunk in chunks:
            sources.append([])
            for piece in held.pieces([row for rows in chunk for row in rows]):
                mine = cuts.setdefault(piece.worker, [])
                sources[-1].append((piece.worker, len(mine), piece.places))
                mine.append((piece.batch_id, piece.rows))
        made = {worker: self._cut(worker, mine) for worker, mine in sorted(cuts.items())}
        refs = []
        for number, (chunk, parts) in enumerate(zip(chunks, sources, strict=True)):
            # Where the rows of the chunk are in the parts, one after another.
            order = np.argsort(np.concatenate([places for _, _, places in parts]))
            ends = np.cumsum([len(rows) for rows in chunk])
            refs += self._deal(number, np.split(order, ends[:-1]), [made[worker][cut] for worker, cut, _ in parts])
        return refs

    @property
    def _ranks_per_call(self) -> int:
        return max(RANKS_PER_CALL, RANKS_PER_CALL_AND_WORKER * len(self))

    def _cut(self, worker: int, cuts: Sequence[tuple[int, list[int]]], *, trained: bool = True) -> list[ray.ObjectRef]:
        cut = self.handles[worker].cut.options(num_returns=len(cuts)).remote(cuts, trained=trained)
        return cut if len(cuts) > 1 else [cut]

    def _deal(self, worker: int, orders: Sequence[np.ndarray], parts: Sequence[ray.ObjectRef]) -> list[ray.ObjectRef]:
        options = self.handles[worker].deal.options(num_returns=len(orders))
        dealt = options.remote([places.tolist() for places in orders], *parts)
        return dealt if len(orders) > 1 else [dealt]

    def dump(
        self,
        held: HeldRows,
        made: Sequence[TokenColumn],
        samples: Mapping[str, np.ndarray],
        parts: Mapping[Path, range],
    ) -> None:
        """Writes rows of a step's batch, as `RolloutWorker.dump`; each worker one part at most, and fetches no others.

        made: token columns of the trainer.  samples: sample columns of the whole batch.
        parts: file -> its rows, in their order; at most `num_dump_parts`.
        """
        ranges = list(parts.values())
        # Of each part: (batch of its worker, rows of it, which rows of the step they are).
        own: list[list[tuple[int, list[int], np.ndarray]]] = [[] for _ in ranges]
        # Of each part, what others have: (which rows of the step, reference to their token columns).
        others: list[list[tuple[np.ndarray, ray.ObjectRef]]] = [[] for _ in ranges]
        cuts: dict[int, list[tuple[int, list[int]]]] = {}
        cut_for: dict[int, list[tuple[int, np.ndarray]]] = {}
        for number, part in enumerate(ranges):
            for piece in held.pieces(part):
                step_rows = part.start + np.array(piece.places)
                if piece.worker == number:
                    own[number].append((piece.batch_id, piece.rows, step_rows))
                else:
                    cuts.setdefault(piece.worker, []).append((piece.batch_id, piece.rows))
                    cut_for.setdefault(piece.worker, []).append((number, step_rows))
        for worker, mine in cuts.items():
            for (number, step_rows), ref in zip(cut_for[worker], self._cut(worker, mine, trained=False), strict=True):
                others[number].append((step_rows, ref))
        part_S = np.repeat(np.arange(len(ranges)), [len(part) for part in ranges])
        for column in made:
            for number, step_rows, ref in self._dealt_by(column, part_S, self._ranks_per_call):
                others[number].append((step_rows, ref))
        calls = []
        for number, (file, part) in enumerate(parts.items()):
            columns = {name: column[part.start : part.stop] for name, column in samples.items()}
            rows, refs = [rows for rows, _ in others[number]], [ref for _, ref in others[number]]
            calls.append(self.handles[number].dump.remote(str(file), columns, own[number], rows, *refs))
        self._values("dump", calls)

    @property
    def num_dump_parts(self) -> int:
        return min(len(self), MAX_DUMP_PARTS)

    def redistribute(self, column: TokenColumn, plan: StepPlan) -> list[ray.ObjectRef]:
        """Cuts a token column for the data-parallel ranks of another plan; returns a reference for each rank.

        A rank's rows are in the fragments of nearly all others. So workers deal the fragments to groups of ranks, and
        then what each group gets to its ranks: each rank gets one object, and nobody a row that it does not need.
        """
        place_S, size = np.argsort(plan.rows_by_rank), self._ranks_per_call
        firsts = list(range(0, plan.dp_size, size))
        group_S = np.searchsorted([plan.starts[rank] for rank in firsts], place_S, side="right") - 1
        # Of each group: (which rows of the step, reference to the column's values of them).
        parts: list[list[tuple[np.ndarray, ray.ObjectRef]]] = [[] for _ in firsts]
        for group, rows, ref in self._dealt_by(column, group_S, size):
            parts[group].append((rows, ref))
        refs = []
        for group, first in enumerate(firsts):
            starts = plan.starts[first : first + size + 1]
            order = np.argsort(place_S[np.concatenate([rows for rows, _ in parts[group]])])
            orders = np.split(order, [start - starts[0] for start in starts[1:-1]])
            refs += self._deal(group % len(self), orders, [ref for _, ref in parts[group]])
        return refs

    def _dealt_by(
        self, column: TokenColumn, label_S: np.ndarray, ranks_per_call: int
    ) -> list[tuple[int, np.ndarray, ray.ObjectRef]]:
        """Has workers cut a column by label: (label, rows of the step, reference to their values), several for a label.

        Each worker takes the fragments of some ranks, and makes one object of these for each label.
        """
        dealt = []
        for number, ranks in enumerate(_split(range(column.plan.dp_size), ranks_per_call)):
            rows = np.concatenate([column.plan.rows(dp_rank) for dp_rank in ranks])
            places_of = places_by_label(label_S[rows])
            fragments = [column.fragments[dp_rank] for dp_rank in ranks]
            refs = self._deal(number % len(self), [places for _, places in places_of], fragments)
            dealt += [(label, rows[places], ref) for (label, places), ref in zip(places_of, refs, strict=True)]
        return dealt

    def drop(self, samples: BatchRef) -> None:
        self._ask("drop", samples.held.batches)

    def texts(
        self, samples: BatchRef, rows: Sequence[int], dataset: str, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """The texts of these rows, as `RolloutWorker.texts`."""
        pieces = samples.held.pieces(rows)
        asked = [(piece.worker, piece.batch_id, piece.rows, dataset, with_special_tokens) for piece in pieces]
        text_of: dict[int, tuple[str, str, str]] = {}
        for piece, texts in zip(pieces, self._ask("texts", asked), strict=True):
            text_of |= dict(zip(piece.places, texts, strict=True))
        return [text_of[place] for place in range(len(text_of))]

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
    """The items in pieces of that size, the last one perhaps smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def merged(groups: Sequence[SampleGroup], made: Mapping[int, GeneratedBatch]) -> tuple[GeneratedBatch, HeldRows]:
    """Merges the workers' parts of a generation, with rows in the order of the groups. made: worker -> its part."""
    workers, position_of = list(made), {group.uid: position for position, group in enumerate(groups)}
    # A part without a finished group has columns of no type.
    filled = [worker for worker in workers if len(made[worker].samples["uid"])] or workers[:1]
    columns = [made[worker].samples for worker in filled]
    sizes = [len(column["uid"]) for column in columns]
    # All batches are named, so that all are dropped.
    batches = tuple((worker, part.batch_id) for worker, part in made.items())
    batch_S = np.repeat([workers.index(worker) for worker in filled], sizes)
    held, samples = HeldRows(batches, batch_S, np.concatenate([np.arange(size) for size in sizes])), columns[0]
    if len(columns) > 1:
        samples = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        order = np.argsort([position_of[uid] for uid in samples["uid"].tolist()], kind="stable")
        samples, held = {name: column[order] for name, column in samples.items()}, held.select(order.tolist())
    unfinished = [group for part in made.values() for group in part.unfinished]
    whole = replace(
        made[workers[0]],
        samples=samples,
        gen_s=max(part.gen_s for part in made.values()),
        reward_wait_s=max(part.reward_wait_s for part in made.values()),
        num_resubmitted=sum(part.num_resubmitted for part in made.values()),
        missing=[server for part in made.values() for server in part.missing],
        unfinished=sorted(unfinished, key=lambda group: position_of[group.uid]),
    )
    return whole, held
