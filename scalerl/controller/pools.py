"""Ray cluster and the devices that worker groups run on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from scalerl.errors import UserError

# Set in every worker process: one compute thread per process on CPU, and no downloads that nobody asked for.
WORKER_ENV = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class ResourceError(UserError, RuntimeError):
    """The cluster does not have what the configuration asks for."""


@contextmanager
def ray_cluster(*, num_workers: int, device: str) -> Iterator[None]:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine; leaves (and ends the local one) on exit."""
    env = WORKER_ENV | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})
    common = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
        "runtime_env": {"env_vars": env},
        "namespace": "scalerl",
    }
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The first rank's error is raised with its cause; Ray would print a stack for every other rank's beside it.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if os.environ.get("RAY_ADDRESS"):
        common.pop("include_dashboard")
        ray.init(**common)
    else:
        # On CPU a rank is a process, so the machine has as many places as the configuration asks for.
        num_cpus = max(os.cpu_count() or 1, num_workers) if device == "cpu" else None
        # "local": a cluster that someone else started on this machine is not ours to use.
        ray.init("local", num_cpus=num_cpus, object_store_memory=_object_store_bytes(), **common)
    try:
        yield
    finally:
        ray.shutdown()


def _object_store_bytes() -> int:
    """A quarter of the machine's memory and at most half of /dev/shm (Ray spills to disk beyond)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shm = os.statvfs("/dev/shm")
    return max(100 * 2**20, min(memory // 4, shm.f_bavail * shm.f_frsize // 2, 32 * 2**30))


@dataclass(frozen=True)
class ResourcePool:
    """nnodes bundles of devices_per_node devices each, one bundle a node."""

    group: PlacementGroup
    nnodes: int
    devices_per_node: int
    device: str

    @classmethod
    def create(
        cls, *, nnodes: int, devices_per_node: int, device: str, timeout_s: float, section: str = "trainer"
    ) -> ResourcePool:
        """section: the keys that ask for it, for the error."""
        bundle = {"CPU": float(devices_per_node)}
        if device == "cuda":
            bundle["GPU"] = float(devices_per_node)
        group = placement_group([bundle] * nnodes, strategy="STRICT_SPREAD" if nnodes > 1 else "PACK")
        ready, _ = ray.wait([group.ready()], timeout=timeout_s)
        if not ready:
            remove_placement_group(group)
            raise ResourceError(
                f"no {nnodes} nodes with {bundle} each within {timeout_s:.0f} s; the cluster has "
                f"{ray.cluster_resources()}. Set {section}.nnodes and {section}.n_gpus_per_node to what is there"
            )
        return cls(group, nnodes, devices_per_node, device)

    @property
    def world_size(self) -> int:
        return self.nnodes * self.devices_per_node

    def place(self, node: int, *, num_devices: float) -> dict:
        """Ray options for an actor on that node's bundle."""
        return {
            "num_cpus": num_devices,
            "num_gpus": num_devices if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node),
        }

    def node_ids(self) -> set[str]:
        """Of the machines that it is on."""
        return set(placement_group_table(self.group)["bundles_to_node_id"].values())

    def release(self) -> None:
        remove_placement_group(self.group)
