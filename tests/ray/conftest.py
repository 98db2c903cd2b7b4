"""Groups of workers on the cluster of the whole session, in processes that are left from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scalerl.cluster.processes import Lease, Processes
from scalerl.cluster.worker_group import WorkerGroup, join_ranks
from scalerl.parallel.layout import Layout

START_TIMEOUT_S = 180.0


@pytest.fixture(scope="session")
def cluster(processes: Processes) -> Processes:
    return processes


@pytest.fixture(scope="module")
def start_group(cluster: Processes) -> Iterator[Callable[..., WorkerGroup]]:
    """Worker class, layout and the class's own arguments -> the group. All leave with the module at the latest."""
    started: list[tuple[Lease, WorkerGroup]] = []

    def start(cls: type, layout: Layout, **init: object) -> WorkerGroup:
        lease = Lease(cluster)
        pool = lease.pool(nnodes=1, devices_per_node=layout.world_size, device="cpu", timeout_s=START_TIMEOUT_S)
        group = lease.add(WorkerGroup(pool, cls, layout, timeout_s=START_TIMEOUT_S, **init))
        started.append((lease, group))
        join_ranks([group])
        return group

    def stop(group: WorkerGroup, failed: Exception | None = None) -> None:
        """failed: what a run with these ranks would have ended with."""
        lease = next(lease for lease, held in started if held is group)
        started.remove((lease, group))
        lease.__exit__(None if failed is None else type(failed), failed, None)

    start.stop = stop
    yield start
    for _, group in list(started):
        stop(group)
