"""A Ray that does not start, or ends in its start: one message, exit code 70, its logs kept, nothing of it left."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scalerl.errors import EXIT_FAILED, EXIT_USER_ERROR
from tests.slow_agents import make_agents_slow, number_of_slow_agents

START = """
import os
import sys
import time
from pathlib import Path
import ray
from ray._private import services
from scalerl.cluster import ray_session
from scalerl.cluster import pools
from scalerl.cluster.pools import ResourcePool, ray_cluster
from scalerl.errors import run_main

def start():
    with ray_cluster(num_workers=1, device="cpu", log_dir=Path(sys.argv[1])):
        print("started")
        print(ray.get(ray.remote(lambda: "worked").remote()), flush=True)
        time.sleep(float(os.environ.get("HOLD_S", 0)))
        if "POOL_TIMEOUT_S" in os.environ:
            wanted = {"nnodes": 2, "devices_per_node": 1, "device": "cpu"}
            pool = ResourcePool.create(**wanted, timeout_s=float(os.environ["POOL_TIMEOUT_S"]))
            print(len(pool.node_ids()), flush=True)

pools.SILENT_S = 0.5
ray_session.REACH_S = float(os.environ.get("REACH_S", ray_session.REACH_S))
services.RAYLET_EXECUTABLE = sys.argv[2] or services.RAYLET_EXECUTABLE
sys.exit(run_main(start))
"""
KILLED = """
import sys
import time
import ray
from scalerl.cluster.failures import values_of
from scalerl.cluster.pools import ray_cluster
from scalerl.errors import run_main

@ray.remote(num_cpus=0)
class Waiting:
    def work(self):
        time.sleep(300)

def start():
    with ray_cluster(num_workers=1, device="cpu", log_dir=None):
        values_of("generation", [Waiting.remote().work.remote()], 120)

sys.exit(run_main(start))
"""
TIMEOUT_S = 300.0
# What is stopped never ends by itself.
LEFT_S = 60.0


@pytest.fixture
def ray_files() -> Iterator[Path]:
    """The directory of Ray's files. Of a short name: Ray's sockets lie below it."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


def start(
    ray_files: Path, logs: Path, *, program: str = START, raylet: str = "", **environment: str
) -> subprocess.Popen[str]:
    """Starts Ray in a process of its own.  raylet: the program that it starts as its raylet; empty: Ray's."""
    # Without what the cluster of the other tests has set.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(logs), raylet],
        env=kept | {"RAY_TMPDIR": str(ray_files)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_explained(process: subprocess.Popen[str], ray_files: Path, logs: Path, reason: str) -> None:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_FAILED, err
    assert out == "" and "Traceback" not in err
    assert err.startswith("error: Ray did not start on ") and reason in err.splitlines()[0]
    assert f"Ray's logs: {logs / 'ray'} " in err and (logs / "ray" / "gcs_server.out").is_file()
    assert list(ray_files.iterdir()) == []


def test_a_start_that_takes_too_long(ray_files: Path, tmp_path: Path) -> None:
    """Ray's own limit for the first of its servers is set to nothing."""
    process = start(ray_files, tmp_path, RAY_gcs_server_port_wait_time_s="0")
    assert_explained(process, ray_files, tmp_path, "Timed out waiting for file")


@pytest.mark.full
def test_a_raylet_that_ends_at_once(ray_files: Path, tmp_path: Path) -> None:
    """As one that the kernel kills for memory, or that finds no room. Ray waits half a minute for it."""
    process = start(ray_files, tmp_path, raylet="/bin/false")
    assert_explained(process, ray_files, tmp_path, "The current node timed out during startup")


@pytest.mark.full
def test_agents_that_start_slowly(ray_files: Path, tmp_path: Path) -> None:
    make_agents_slow(tmp_path / "slow")
    path = os.pathsep.join(filter(None, [str(tmp_path / "slow"), os.environ.get("PYTHONPATH")]))
    process = start(ray_files, tmp_path / "logs", PYTHONPATH=path)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (0, "started\nworked\n"), err
    assert number_of_slow_agents(tmp_path / "slow") == 2
    assert list(ray_files.iterdir()) == []


def test_an_actor_that_rays_memory_monitor_kills(ray_files: Path, tmp_path: Path) -> None:
    """The error is a WorkerError, after which ranks are started again; Ray's own says OutOfMemoryError."""
    process = start(ray_files, tmp_path, program=KILLED, RAY_memory_usage_threshold="0.01")
    err = process.communicate(timeout=TIMEOUT_S)[1]
    assert process.returncode == EXIT_FAILED, err
    killed = r"error: generation: the process died: \d worker\(s\) were killed due to the node running low on memory"
    assert re.search(killed, err) and "Traceback" not in err, err


def is_there(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_what_a_raylet_started_ends_with_it_whatever_it_does(ray_files: Path, tmp_path: Path) -> None:
    """A worker that still imports, and an agent that tries to reach the head, are as deaf as a stopped process."""
    driver = start(ray_files, tmp_path, HOLD_S="600")
    assert driver.stdout is not None
    assert [driver.stdout.readline() for _ in range(2)] == ["started\n", "worked\n"]
    below = psutil.Process(driver.pid).children(recursive=True)
    (raylet,) = (process for process in below if process.name() == "raylet")
    started = raylet.children()
    try:
        # Two agents and a worker; their titles are Ray's.
        assert {" ".join(process.cmdline()).split()[0] for process in started} >= {
            "ray::DashboardAgent",
            "ray::RuntimeEnvAgent",
            "ray::IDLE",
        }
        for process in started:
            process.suspend()
        driver.kill()
        driver.communicate(timeout=TIMEOUT_S)
        deadline = time.monotonic() + LEFT_S
        while left := list(filter(is_there, below)):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        for process in filter(is_there, below):
            process.kill()


def test_a_run_says_what_it_waits_for_and_goes_on_when_a_machine_joins(ray_files: Path, tmp_path: Path) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
    driver = start(ray_files, tmp_path, POOL_TIMEOUT_S="300", **token)
    assert driver.stderr is not None
    said = driver.stderr.readline()
    assert "waiting for 2 nodes with 1 CPU free each (trainer.nnodes and trainer.n_gpus_per_node)" in said
    joins = re.search(r"the cluster has 1: \S+ \(\d+ CPU\)\. A machine joins it with: (ray start --address=\S+)", said)
    assert joins, said
    command = [str(Path(sys.executable).with_name("ray")), *joins[1].split()[1:], "--num-cpus=1", "--block"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    machine = subprocess.Popen(command, env=kept | token, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        out, err = driver.communicate(timeout=TIMEOUT_S)
        assert (driver.returncode, out) == (0, "started\nworked\n2\n"), err
    finally:
        for process in [*psutil.Process(machine.pid).children(recursive=True), machine]:
            process.kill()
        machine.wait()


@pytest.mark.full
def test_a_machine_that_does_not_come(ray_files: Path, tmp_path: Path) -> None:
    _, err = start(ray_files, tmp_path, POOL_TIMEOUT_S="2").communicate(timeout=TIMEOUT_S)
    assert "error: no 2 nodes with 1 CPU free each within 2 s; the cluster has 1: " in err
    assert "Set trainer.nnodes and trainer.n_gpus_per_node to what is there" in err


def assert_not_joined(process: subprocess.Popen[str], address: str, reason: str) -> None:
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_FAILED and "Traceback" not in err
    assert f"error: the Ray cluster at RAY_ADDRESS = {address} was not joined from " in err and reason in err


def test_a_cluster_that_is_not_there(ray_files: Path, tmp_path: Path) -> None:
    """Ray would try for more than ten minutes."""
    process = start(ray_files, tmp_path, RAY_ADDRESS="127.0.0.1:1", REACH_S="1")
    assert_not_joined(process, "127.0.0.1:1", "nothing takes a connection there ([Errno 111] Connection refused)")


@pytest.mark.full
def test_a_server_that_is_no_cluster(ray_files: Path, tmp_path: Path) -> None:
    """Something else has the port. Ray has one try, of a second."""
    limits = {"RAY_gcs_server_port_wait_time_s": "1", "RAY_py_gcs_connect_timeout_s": "1"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert_not_joined(start(ray_files, tmp_path, RAY_ADDRESS=address, **limits), address, "")


def test_a_directory_whose_path_is_too_long_for_sockets(ray_files: Path, tmp_path: Path) -> None:
    long = ray_files / ("x" * 80)
    long.mkdir()
    process = start(long, tmp_path)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_USER_ERROR and err.startswith(f"error: Ray's sockets do not fit into {long}: ")
    assert "RAY_TMPDIR" in err and list(long.iterdir()) == []
