"""`RolloutWorkers`: on the driver, which rollout worker has which servers and groups, and calls to the workers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from scalerl.cluster.ask import answer_of, values_of
from scalerl.cluster.batch import BatchRef, HeldRows
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.pools import PooledActor
from scalerl.cluster.worker_group import LEAVE_TIMEOUT_S

if TYPE_CHECKING:
    from scalerl.balance import StepPlan
    from scalerl.controller.sampling.groups import SampleGroup
    from scalerl.controller.sampling.worker import Generated
    from scalerl.servers.recovery import LostServer
    from scalerl.servers.replica import ClientSettings, Replica

T = TypeVar("T")

# Servers per worker where rollout.num_workers is not set.
SERVERS_PER_WORKER = 8
# Data-parallel ranks whose tokens a worker cuts or puts together at a time: so many are in its memory twice.
RANKS_PER_CALL = 16


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
        values_of("rollout worker start", [process.ready for process in self.processes], self.timeout_s)

    def owner(self, group: SampleGroup) -> int:
        return self.owner_of_server[group.position % len(self.owner_of_server)]

    def dealt(self, groups: Sequence[SampleGroup]) -> dict[int, list[SampleGroup]]:
        """Worker -> its groups, in order; workers without any are left out, but for the first if there is no group."""
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
        values_of("rollout worker connect", calls, self.timeout_s)
        self.news = {handle.next_lost.remote(): worker for worker, handle in enumerate(self.handles)}

    def take_news(self, told: ray.ObjectRef) -> list[LostServer]:
        """Waits for a report in `news`, and returns the servers that it names."""
        worker = self.news.pop(told)
        (lost,) = values_of("generation", [told], self.timeout_s)
        self.news[self.handles[worker].next_lost.remote()] = worker
        return lost

    def news_so_far(self) -> list[LostServer]:
        if not self.news:
            return []
        told, _ = ray.wait(list(self.news), num_returns=len(self.news), timeout=0)
        return [server for news in told for server in self.take_news(news)]

    def replace(self, successors: Mapping[int, Replica]) -> None:
        """Tells workers of restarted servers; no generation uses these before `in_service`."""
        for worker, indices in self._by_owner(successors).items():
            self.ask(worker, "replace", {index: successors[index] for index in indices})

    def in_service(self, indices: Sequence[int]) -> None:
        """Tells workers that restarted servers have the trainer's weights: generations that wait for them continue."""
        for worker, mine in self._by_owner(indices).items():
            self.ask(worker, "in_service", mine)

    def _by_owner(self, indices: Sequence[int] | Mapping[int, Any]) -> dict[int, list[int]]:
        indices_of: dict[int, list[int]] = {}
        for index in indices:
            indices_of.setdefault(self.owner_of_server[index], []).append(index)
        return indices_of

    # --- what they hold ---

    def join(self, parts: Sequence[tuple[BatchRef, Sequence[int]]]) -> BatchRef:
        """Joins rows of several batches, in order, into one; the batches themselves are dropped."""
        asked: dict[int, list[tuple[int, list[int]]]] = {}
        sizes: dict[int, int] = {}
        workers, rows = [], []
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
            for worker, batch_id in unused:
                self.ask(worker, "drop", batch_id)
            workers.append(worker_R)
            rows.append(row_R)
        batches = tuple((worker, self.ask(worker, "join", cuts)) for worker, cuts in sorted(asked.items()))
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
        chunks = _split(ranks, RANKS_PER_CALL)
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
            orders = [places.tolist() for places in np.split(order, ends[:-1])]
            options = self.handles[number].deal.options(num_returns=len(orders))
            dealt = options.remote(orders, *(made[worker][index] for worker, index, _ in parts))
            refs += dealt if len(orders) > 1 else [dealt]
        return refs

    def _cut(self, worker: int, cuts: Sequence[tuple[int, list[int]]]) -> list[ray.ObjectRef]:
        cut = self.handles[worker].cut.options(num_returns=len(cuts)).remote(cuts)
        return cut if len(cuts) > 1 else [cut]

    def drop(self, samples: BatchRef) -> None:
        for worker, batch_id in samples.held.batches:
            self.ask(worker, "drop", batch_id)

    def texts(
        self, samples: BatchRef, rows: Sequence[int], dataset: str, with_special_tokens: bool
    ) -> list[tuple[str, str, str]]:
        """The texts of these rows, as `RolloutWorker.texts`."""
        text_of: dict[int, tuple[str, str, str]] = {}
        for piece in samples.held.pieces(rows):
            texts = self.ask(piece.worker, "texts", piece.batch_id, piece.rows, dataset, with_special_tokens)
            text_of |= dict(zip(piece.places, texts, strict=True))
        return [text_of[place] for place in range(len(text_of))]

    # --- calls ---

    def ask(self, worker: int, method: str, *args: Any) -> Any:
        return answer_of("rollout worker", getattr(self.handles[worker], method), *args, timeout_s=self.timeout_s)

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


def merged(groups: Sequence[SampleGroup], made: Mapping[int, Generated]) -> tuple[Generated, HeldRows]:
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
