"""Where Ray's agents are to listen; on a real cluster: test_cluster.py and test_ray_start.py of tests/ray."""

from __future__ import annotations

import inspect
import os
import socket
from pathlib import Path

import pytest
from ray._private import services

from scalerl.cluster.ray_agents import free_ports

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
