"""Wait until Ray runs on every given host with its devices; name the missing ones when the deadline passes."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import ray

EXIT_INFRASTRUCTURE = 70
POLL_S = 0.3
REPORT_EVERY_S = 30.0
# How long hosts that nobody needs are waited for, after all that are needed are ready.
SPARE_WAIT_S = 30.0


def missing_hosts(nodes: list[dict[str, Any]], hosts: list[str], gpus: int) -> dict[str, str]:
    """What each host that is not ready lacks. `nodes` is `ray.nodes()`; a node's name is its Slurm host name."""
    alive = {node["NodeName"]: node["Resources"] for node in nodes if node["Alive"]}
    missing = {}
    for host in hosts:
        if host not in alive:
            missing[host] = "not in the cluster"
        elif (num_gpus := int(alive[host].get("GPU", 0))) < gpus:
            missing[host] = f"{num_gpus} of {gpus} GPUs"
    return missing


def connect(address: str, deadline: float) -> None:
    """Joins the cluster, trying until the deadline: the GCS answers before the head's raylet does."""
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, TimeoutError, RuntimeError, ValueError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of the head")
    parser.add_argument("--hosts", required=True, help="comma-separated node names")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that each node must offer")
    parser.add_argument("--needed", type=int, help="number of nodes that is enough; all by default")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--session-file", type=Path, help="gets the path of Ray's session directory")
    parser.add_argument("--missing-file", type=Path, help="gets the nodes that are not ready, one a line")
    args = parser.parse_args()
    hosts = args.hosts.split(",")
    needed = len(hosts) if args.needed is None else args.needed
    deadline = time.monotonic() + args.timeout_s
    connect(args.address, deadline)
    if args.session_file:
        context = ray.get_runtime_context()
        args.session_file.write_text(f"{context.get_temp_dir()}/{context.get_session_name()}\n")
    next_report = time.monotonic() + REPORT_EVERY_S
    # When the nodes that are ready become enough.
    enough_since: float | None = None
    while missing := missing_hosts(ray.nodes(), hosts, args.gpus):
        lines = "\n".join(f"  {host}: {what}" for host, what in missing.items())
        is_enough = len(hosts) - len(missing) >= needed
        enough_since = (enough_since or time.monotonic()) if is_enough else None
        if enough_since is not None and time.monotonic() > min(deadline, enough_since + SPARE_WAIT_S):
            print(f"without {len(missing)} of {len(hosts)} nodes, {needed} are needed:\n{lines}", flush=True)
            break
        if time.monotonic() > deadline:
            print(f"{len(missing)} of {len(hosts)} nodes not ready after {args.timeout_s:g} s:\n{lines}", flush=True)
            return EXIT_INFRASTRUCTURE
        if time.monotonic() > next_report:
            print(f"waiting for {len(missing)} of {len(hosts)} nodes:\n{lines}", flush=True)
            next_report += REPORT_EVERY_S
        time.sleep(POLL_S)
    if args.missing_file:
        args.missing_file.write_text("".join(f"{host}\n" for host in missing))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
