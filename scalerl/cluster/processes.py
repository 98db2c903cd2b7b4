"""`Processes`: the Ray cluster, and the processes that one run may leave for the next."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import ray

from scalerl.cluster.pools import ResourcePool, ray_cluster

logger = logging.getLogger(__name__)


class RunPart(Protocol):
    """A part of a run that has processes."""

    def leave(self) -> None:
        """Leaves the processes to their pool, ready for another run. Raises when a process does not get ready."""
        ...

    def stop(self) -> None:
        """Ends the processes."""
        ...


class Ranks(RunPart, Protocol):
    """A part of a run whose processes wait for each other."""

    def kill(self) -> None:
        """Ends the processes whatever they do, and waits until they are gone."""
        ...


P = TypeVar("P", bound=RunPart)
R = TypeVar("R", bound=Ranks)


class Processes:
    """Pools of devices on one Ray cluster, with the actors that wait there for a run."""

    def __init__(self, *, keep: bool) -> None:
        """Holds no process yet.  keep: those of a run that ended wait for the next one; else none outlives its run."""
        self.keep = keep
        self._free: list[ResourcePool] = []

    @classmethod
    @contextmanager
    def start(
        cls, *, num_workers: int, device: str, keep: bool = False, log_dir: Path | None = None
    ) -> Iterator[Processes]:
        """Joins the cluster at RAY_ADDRESS, or starts one; all processes end with the block.

        num_workers: on a CPU, how many devices all pools together may have.  log_dir: as `ray_cluster`.
        """
        with ray_cluster(num_workers=num_workers, device=device, log_dir=log_dir):
            processes = cls(keep=keep)
            try:
                yield processes
            finally:
                processes.end_waiting()

    def acquire_pool(
        self, *, nnodes: int, devices_per_node: int, device: str, timeout_s: float, section: str
    ) -> ResourcePool:
        """Takes a free pool of nnodes nodes with at least devices_per_node devices each, or makes a new pool.

        Of the free pools it takes the smallest that fits; of several, the one used last, whose actors likeliest fit.
        """
        fitting = [
            pool
            for pool in reversed(self._free)
            if (pool.nnodes, pool.device) == (nnodes, device) and pool.devices_per_node >= devices_per_node
        ]
        if fitting:
            pool = min(fitting, key=lambda pool: pool.devices_per_node)
            self._free.remove(pool)
            return pool
        self._make_room(nnodes * devices_per_node, device)
        return ResourcePool.create(
            nnodes=nnodes, devices_per_node=devices_per_node, device=device, timeout_s=timeout_s, section=section
        )

    def _make_room(self, num_devices: int, device: str) -> None:
        """Releases free pools, the longest unused first, until Ray has this many devices."""
        name = "GPU" if device == "cuda" else "CPU"
        while self._free and ray.available_resources().get(name, 0.0) < num_devices:
            self._free.pop(0).release()

    def return_pool(self, pool: ResourcePool) -> None:
        self._free.append(pool)

    def end_waiting(self) -> None:
        """Ends the processes that wait for a run, for the memory that they hold; the next run starts new ones."""
        while self._free:
            self._free.pop().release()


@contextmanager
def leased(
    processes: Processes | None, *, num_workers: int, device: str, log_dir: Path | None = None
) -> Iterator[Lease]:
    """Yields the `Lease` of one run on `processes`; None: on new processes, which end with the block.

    num_workers, device, log_dir: as `Processes.start`.
    """
    with ExitStack() as stack:
        if processes is None:
            own = Processes.start(num_workers=num_workers, device=device, log_dir=log_dir)
            processes = stack.enter_context(own)
        yield stack.enter_context(Lease(processes))


Survives = Callable[[BaseException, Sequence[ResourcePool]], bool]


class Lease:
    """The pools and processes that one run uses; at its end they wait for the next run, or end.

    They wait only if the run came to its end: what an error left behind in a process is not known. After an error that
    the run survives, those wait that had no part in it.
    """

    def __init__(self, processes: Processes, *, survives: Survives = lambda error, pools: False) -> None:
        """Holds nothing.  survives: whether the run is built again after this error.  pools: those of this lease."""
        self._processes, self._survives = processes, survives
        # Whole, as taken: the run may see fewer devices of each.
        self._pools: list[ResourcePool] = []
        self._parts: list[RunPart] = []
        # Of these parts: those that end with any error, and those that do not if the run survives it.
        self._ranks: list[Ranks] = []
        self._waiting: list[RunPart] = []

    def pool(
        self, *, nnodes: int, devices_per_node: int, device: str, timeout_s: float, section: str = "trainer"
    ) -> ResourcePool:
        """Takes a pool for this run alone. section: of the configuration that asks for the pool, for the error."""
        whole = self._processes.acquire_pool(
            nnodes=nnodes, devices_per_node=devices_per_node, device=device, timeout_s=timeout_s, section=section
        )
        self._pools.append(whole)
        return whole.first(devices_per_node)

    def add(self, part: P, *, waits_for_restart: bool = True) -> P:
        """Adds a part, which leaves, or is stopped, before the parts that were added earlier.

        waits_for_restart: False: it is stopped after an error that the run survives.
        """
        self._parts.append(part)
        if waits_for_restart:
            self._waiting.append(part)
        return part

    def add_ranks(self, ranks: R) -> R:
        """Adds a part as `add` does; it is killed after an error that the run survives."""
        self._ranks.append(ranks)
        return self.add(ranks, waits_for_restart=False)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._survives(error, self._pools):
            self._end_ranks()
            return
        if error is None and self._processes.keep:
            while self._parts and _left(self._parts[-1]):
                self._parts.pop()
            if not self._parts:
                for pool in self._pools:
                    self._processes.return_pool(pool)
                return
        # Every part is stopped, and then every pool given back, whatever any of them raises.
        with ExitStack() as ending:
            for pool in self._pools:
                ending.callback(pool.release)
            for part in self._parts:
                ending.callback(part.stop)

    def _end_ranks(self) -> None:
        """Kills the ranks, and stops what does not leave; all else waits for the restart of the run."""
        for ranks in self._ranks:
            ranks.kill()
        for part in reversed(self._parts):
            if not (part in self._waiting and _left(part)):
                part.stop()
        for pool in self._pools:
            self._processes.return_pool(pool)


def _left(part: RunPart) -> bool:
    try:
        part.leave()
    except Exception as error:
        logger.warning("%s does not get ready for another run and is stopped: %s", type(part).__name__, error)
        return False
    return True
