"""One Ray cluster for the whole session, and groups of workers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from scalerl.controller.pools import ResourcePool, ray_cluster
from scalerl.controller.worker_group import WorkerGroup, join
from scalerl.parallel.layout import Layout

# Places for all groups of one test file together; a place is a number to Ray, no core.
NUM_WORKERS = 8
START_TIMEOUT_S = 180.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    with ray_cluster(num_workers=NUM_WORKERS, device="cpu"):
        yield


@pytest.fixture(scope="module")
def start_group(cluster: None) -> Iterator[Callable[..., WorkerGroup]]:
    """Worker class, layout and the class's own arguments -> the group. All end with the module at the latest."""
    started: list[tuple[ResourcePool, WorkerGroup]] = []

    def start(cls: type, layout: Layout, **init: object) -> WorkerGroup:
        pool = ResourcePool.create(
            nnodes=1, devices_per_node=layout.world_size, device="cpu", timeout_s=START_TIMEOUT_S
        )
        group = WorkerGroup(pool, cls, layout, timeout_s=START_TIMEOUT_S, **init)
        started.append((pool, group))
        join([group])
        return group

    def stop(group: WorkerGroup) -> None:
        pool = next(pool for pool, held in started if held is group)
        started.remove((pool, group))
        group.stop()
        pool.release()

    start.stop = stop
    yield start
    for _, group in list(started):
        stop(group)
