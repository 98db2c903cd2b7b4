"""Kills the processes of actors whatever they do, and waits until they, and their memory, are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray

from scalerl.cluster.hang_report import GONE, NODES_AT_A_TIME, process_state
from scalerl.cluster.worker_logs import on_node

logger = logging.getLogger(__name__)

# A process with much memory on a device takes a while to end.
GONE_TIMEOUT_S = 60.0
POLL_S = 0.05


def kill_processes(actors: Sequence[Any]) -> None:
    """Kills the processes of actors with SIGKILL, which reaches a stopped or stuck one too, and waits for their end.

    Logs a warning where a node does not answer, or a process does not end.
    """
    # Ray imports its private modules by itself, which its types do not say.
    private: Any = ray._private
    by_node: dict[str, list[int]] = {}
    for actor in actors:
        entry = private.state.actors(actor._actor_id.hex())
        # The number of a process that has ended may be another's now.
        if entry and entry["State"] == "ALIVE":
            by_node.setdefault(entry["Address"]["NodeID"], []).append(entry["Pid"])
    if not by_node:
        return

    def end(node: str) -> None:
        try:
            left = on_node(node, kill_and_wait, by_node[node])
        except Exception as error:
            logger.warning("node %s: processes %s may still run: %s", node, by_node[node], type(error).__name__)
            return
        if left:
            logger.warning("node %s: processes %s do not end after SIGKILL", node, left)

    with ThreadPoolExecutor(min(len(by_node), NODES_AT_A_TIME)) as pool:
        list(pool.map(end, by_node))


def kill_and_wait(pids: Sequence[int], timeout_s: float = GONE_TIMEOUT_S) -> list[int]:
    """Kills processes of this machine and returns those that are still there after timeout_s."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline, left = time.monotonic() + timeout_s, list(pids)
    while left := [pid for pid in left if process_state(pid) not in (GONE, psutil.STATUS_ZOMBIE)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return left
