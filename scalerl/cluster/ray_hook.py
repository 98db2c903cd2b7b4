"""How Ray starts on a node: without what no run uses, without waiting for its agents; processes end with the raylet.

Ray calls `for_a_job` by its name in RAY_START_HOOK. A run that starts its own cluster calls `wait_for_no_agent`.

Ray's raylet waits 15 seconds for each port of its two agents that it is not told, and then ends: too short where many
nodes read Python's packages from one file system, or a machine does much else. No setting changes the 15 seconds. Told
all four ports a raylet waits for none; Ray itself never tells it the fourth.
Source: `start_raylet` of Ray 2.60 (ray/_private/services.py); https://github.com/ray-project/ray/issues/65983
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray._private import ray_constants, services
from ray._private.parameter import RayParams

# Arguments of `start_raylet`; Ray's agents listen there.
_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
# Arguments of a raylet with the commands of what it starts.
_COMMANDS = ("--python_worker_command", "--dashboard_agent_command", "--runtime_env_agent_command")
_PROGRAM = Path(__file__).with_name("child_of_raylet.py")
# `ray.init` gives the fourth of them this number in each cluster of a machine.
_NOT_TOLD = (None, 0, ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
# Of a cluster that a run starts on its machine: below those that Linux gives to connections, and above a job's.
_FIRST, _LAST = 20000, 31999
_EACH = 2 * len(_PORTS)
# Time limit of waiting for an agent; Ray's own is 30 seconds. An agent that ends is noticed at once.
REGISTER_MS = 600_000


def wait_for_no_agent() -> Callable[[], None]:
    """Makes raylets that this process starts, by `ray.init` or `ray start`, wait for no agent; returns what undoes it.

    What they start ends when they end. Ports that Ray is not told are chosen here, others for each process of the
    machine.
    """
    start_raylet, start_process = services.start_raylet, services.start_ray_process
    listen_port: list[int] = []

    def start_raylet_with_ports(*args: Any, **options: Any) -> Any:
        missing = [name for name in _PORTS if options.get(name) in _NOT_TOLD]
        options |= dict(zip(missing, free_ports(len(missing)), strict=True))
        listen_port[:] = [options["dashboard_agent_listen_port"]]
        return start_raylet(*args, **options)

    def start_process_with_port(command: list[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = [*map(_ending_with_raylet, command), f"--dashboard_agent_listen_port={listen_port[0]}"]
        return start_process(command, process_type, *args, **options)

    def undo() -> None:
        services.start_raylet, services.start_ray_process = start_raylet, start_process

    services.start_raylet, services.start_ray_process = start_raylet_with_ports, start_process_with_port
    return undo


def _ending_with_raylet(argument: str) -> str:
    """An argument of a raylet; where it has the command of a worker or an agent, one that ends with the raylet."""
    name, equals, command = argument.partition("=")
    if name not in _COMMANDS or not sys.platform.startswith("linux"):
        return argument
    # Isolated: it needs no package, and finds none of the user's instead of Python's own.
    program = subprocess.list2cmdline([sys.executable, "-I", "-S", str(_PROGRAM)])
    return f"{name}{equals}{program} {command}"


def free_ports(count: int) -> list[int]:
    """Free ports. Each process of the machine looks from another first port on, because two may start at once.

    Raises RuntimeError where there are not as many.
    """
    ports: list[int] = []
    size = _LAST - _FIRST + 1
    begin = os.getpid() * _EACH % size
    for step in range(size):
        if len(ports) == count:
            break
        port = _FIRST + (begin + step) % size
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        ports.append(port)
    if len(ports) < count:
        raise RuntimeError(
            f"Ray's agents need {count} free ports from {_FIRST} to {_LAST}, and there are {len(ports)}: "
            "end what holds them (ss -ltnp shows it)"
        )
    return ports


# Where Ray's own command serves its client when nobody names a port.
_CLIENT_PORT = 10001


def for_a_job(parameters: RayParams, head: bool) -> None:
    """Starts a node of a job: without what no run uses, and without waiting for agents."""
    leave_out_what_no_run_uses(parameters)
    wait_for_no_agent()


def leave_out_what_no_run_uses(parameters: RayParams) -> None:
    """Starts no server for Ray's client, no monitor of logs and no autoscaler, unless they are asked for.

    A driver is always on a node of its cluster, the nodes are Slurm's, and logs stay in the files of the run.
    Source: `ray start` of Ray 2.60 (ray/scripts/scripts.py), which has an option against the monitors alone.
    """
    if parameters.ray_client_server_port == _CLIENT_PORT:
        parameters.ray_client_server_port = None
    parameters.update_if_absent(include_log_monitor=False)
    if parameters.autoscaling_config is None:
        parameters.no_monitor = True
