"""Ray starts on a node without what no run uses, and its agents get ports that nobody has."""

from __future__ import annotations

import inspect
import os
import socket
from pathlib import Path

import pytest
from ray._common.utils import load_class
from ray._private import services
from ray._private.parameter import RayParams

from scalerl.cluster.ray_hook import for_a_job, free_ports, leave_out_what_no_run_uses

LAUNCHER = Path(__file__).parents[3] / "scalerl/extras/slurm/scripts/ray.sbatch"


def test_what_no_run_uses_is_left_out() -> None:
    parameters = RayParams(ray_client_server_port=10001)
    leave_out_what_no_run_uses(parameters)
    assert parameters.ray_client_server_port is None
    assert parameters.include_log_monitor is False and parameters.no_monitor is True


def test_what_a_site_asks_for_is_started() -> None:
    parameters = RayParams(ray_client_server_port=10777, include_log_monitor=True, autoscaling_config="cluster.yaml")
    leave_out_what_no_run_uses(parameters)
    assert parameters.ray_client_server_port == 10777
    assert parameters.include_log_monitor is True and parameters.no_monitor is False


def test_the_launcher_names_it() -> None:
    (name,) = {
        word.partition(":-")[2].rstrip("}")
        for word in LAUNCHER.read_text(encoding="utf-8").split()
        if word.startswith("RAY_START_HOOK=")
    }
    assert load_class(name) is for_a_job


FLAG = "--dashboard_agent_listen_port"


def test_ports_are_free_and_others_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    # The second of the first process is taken.
    with socket.create_server(("", 24001)):
        for process in (2000, 2001):
            monkeypatch.setattr(os, "getpid", lambda process=process: process)
            chosen += free_ports(4)
    assert len(set(chosen)) == len(chosen) == 8
    assert 24000 in chosen and 24001 not in chosen
    assert all(20000 <= port < 32000 for port in chosen)


def test_more_ports_than_there_are() -> None:
    with pytest.raises(RuntimeError, match="need 12001 free ports from 20000 to 31999, and there are"):
        free_ports(12001)


def test_the_raylet_knows_what_ray_itself_does_not_tell_it() -> None:
    """Once Ray tells it, the module is of no use; a raylet that does not know a flag does not start."""
    source = inspect.getsource(services.start_raylet)
    assert "start_ray_process(" in source and "--runtime_env_agent_port=" in source and FLAG not in source
    assert FLAG.removeprefix("--").encode() in Path(services.RAYLET_EXECUTABLE).read_bytes()
