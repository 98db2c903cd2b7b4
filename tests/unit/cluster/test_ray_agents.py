"""Where Ray's agents listen is known before they are there; with agents that are slow: tests/ray/test_ray_start.py."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import services

from scalerl.cluster.ray_agents import wait_for_no_agent

FLAG = "--dashboard_agent_listen_port"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What Ray's own functions are called with, while `wait_for_no_agent` is in force; nothing is started."""
    calls: list[dict[str, Any]] = []

    def start_process(command: list[str], process_type: str, fate_share: bool, **options: Any) -> str:
        calls.append({"command": command, "type": process_type, "fate_share": fate_share} | options)
        return "process"

    def start_raylet(gcs_address: str, **options: Any) -> str:
        calls.append({"gcs_address": gcs_address} | options)
        return services.start_ray_process(["raylet"], "raylet", fate_share=True, cwd="/")

    monkeypatch.setattr(services, "start_ray_process", start_process)
    monkeypatch.setattr(services, "start_raylet", start_raylet)
    undo = wait_for_no_agent()
    yield calls
    undo()
    assert (services.start_raylet, services.start_ray_process) == (start_raylet, start_process)


def test_the_raylet_is_told_the_ports_that_ray_was_told(started: list[dict[str, Any]]) -> None:
    ports = {"metrics_agent_port": 6403, "metrics_export_port": 6405, "runtime_env_agent_port": 6402}
    ports |= {"dashboard_agent_listen_port": 6404}
    assert services.start_raylet("n1:6379", **ports, max_bytes=7) == "process"
    raylet = {"command": ["raylet", f"{FLAG}=6404"], "type": "raylet", "fate_share": True, "cwd": "/"}
    assert started == [{"gcs_address": "n1:6379"} | ports | {"max_bytes": 7}, raylet]


def test_other_processes_are_started_as_they_are(started: list[dict[str, Any]]) -> None:
    services.start_ray_process(["gcs_server"], "gcs_server", False)
    assert started == [{"command": ["gcs_server"], "type": "gcs_server", "fate_share": False}]


def test_ports_that_ray_was_not_told_are_free_and_others_for_each_process(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    # The second of the first process is taken.
    with socket.create_server(("", 24001)):
        for process in (2000, 2001):
            monkeypatch.setattr(os, "getpid", lambda process=process: process)
            services.start_raylet("n1:6379", metrics_agent_port=0, metrics_export_port=None, runtime_env_agent_port=0)
            ports, raylet = started[-2:]
            own = [port for name, port in ports.items() if name.endswith("_port")]
            assert len(own) == 4
            assert raylet["command"] == ["raylet", f"{FLAG}={ports['dashboard_agent_listen_port']}"]
            chosen += own
    assert len(set(chosen)) == 8 and 24000 in chosen and 24001 not in chosen
    assert all(20000 <= port < 32000 for port in chosen)


def test_the_raylet_knows_what_ray_itself_does_not_tell_it() -> None:
    """Once Ray tells it, the module is of no use; a raylet that does not know a flag does not start."""
    source = inspect.getsource(services.start_raylet)
    assert "start_ray_process(" in source and "--runtime_env_agent_port=" in source and FLAG not in source
    assert FLAG.removeprefix("--").encode() in Path(services.RAYLET_EXECUTABLE).read_bytes()
