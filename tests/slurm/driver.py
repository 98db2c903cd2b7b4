"""What the jobs of test_ray_job.py run on the head: a real Ray driver.

Modes: `report`; `wait`, until USR1 or TERM: then it asks every node, as a checkpoint does, and ends with 75, with
`wait slowly` some seconds later, in which it listens to no signal any more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from scalerl.cluster.pools import ResourcePool


def leaked() -> list[str]:
    """Variables of this process by which a program would take itself for a rank of srun."""
    return [name for name in os.environ if name.startswith(("SLURM", "PMI", "OMPI", "MPI_"))]


def not_used() -> list[str]:
    """Processes on this node by which Ray serves what no run uses."""
    programs = ("ray.util.client.server", "log_monitor.py", "monitor.py")
    words = {Path(word).name for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ()}
    return sorted(words.intersection(programs))


@ray.remote(num_cpus=1)
def where() -> dict[str, object]:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {
        "host": socket.gethostname(),
        "leaked": leaked(),
        "devices": sorted(devices.split(",")),
        "network": os.environ.get("NCCL_SOCKET_IFNAME"),
        "gdr_level": os.environ.get("NCCL_NET_GDR_LEVEL"),
        "not_used": not_used(),
        "niceness": os.nice(0),
    }


@ray.remote(num_cpus=1)
def hold() -> None:
    time.sleep(600)


def report(num_nodes: int, gpus: int) -> dict[str, object]:
    """Run one task per node, each with all GPUs of its node."""
    group = placement_group([{"CPU": 1, "GPU": gpus}] * num_nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    tasks = []
    for i in range(num_nodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        tasks.append(where.options(num_gpus=gpus, scheduling_strategy=strategy).remote())
    nodes = {node["NodeName"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    cpus = ray.cluster_resources()["CPU"]
    placement: dict[str, object] = {
        "nodes": nodes,
        "tasks": ray.get(tasks, timeout=60),
        "driver_leaked": leaked(),
        "cpus": cpus,
    }
    pool = ResourcePool.create(nnodes=num_nodes, devices_per_node=1, device="cpu", timeout_s=60)
    placed = [where.options(**pool.place(i, num_devices=1)).remote() for i in range(num_nodes)]
    return placement | {"order": [answer["host"] for answer in ray.get(placed, timeout=60)]}


def wait(slowly: bool) -> int:
    told: list[signal.Signals] = []
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: told.append(signal.Signals(number)))
    # A task that holds a worker process, so that there is something to clean up.
    task = hold.remote()
    print("WAITING", flush=True)
    while not told:
        ray.wait([task], timeout=0.1)
    # Ray may be told at the same moment: late enough to see what it makes of it.
    time.sleep(1)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    asked = [where.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    hosts = sorted(str(answer["host"]) for answer in ray.get(asked, timeout=30))
    print("SAVED", told[0].name, *hosts, flush=True)
    if slowly:
        # As Python does to a handler while it ends.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        time.sleep(60)
    return 75


def main() -> int:
    mode, *rest = sys.argv[1:]
    ray.init(log_to_driver=False)  # the address comes from RAY_ADDRESS
    if mode == "wait":
        return wait("slowly" in rest)
    print("REPORT", json.dumps(report(int(rest[0]), int(rest[1]))), flush=True)
    return int(rest[2])


if __name__ == "__main__":
    sys.exit(main())
