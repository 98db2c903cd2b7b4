"""The cluster of a run: who may call it, what its workers see, how long a generation and a worker's end may take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import ray
from ray._private import ray_constants, services
from ray.exceptions import RayActorError, RayTaskError

from scalerl.cluster.failures import WorkerError, values_of
from scalerl.cluster.pools import ActorSpec, Reusable
from scalerl.cluster.processes import Lease, Processes
from scalerl.config.schema import RolloutConfig
from scalerl.rollout.sampling import rollout_workers
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.rollout.sampling.rollout_workers import RolloutWorkers

ASK = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None))
"""


def ask(**environment: str) -> subprocess.CompletedProcess[str]:
    """What a process of this environment gets from the cluster."""
    address = ray.get_runtime_context().gcs_address
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    return subprocess.run(
        [sys.executable, "-c", ASK, address], env=kept | environment, capture_output=True, text=True, timeout=300
    )


def test_a_stranger_is_refused(cluster: Processes) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    assert ask(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).returncode == 0
    for stranger in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        refused = ask(**stranger)
        assert refused.returncode != 0 and "InvalidAuthToken" in refused.stderr


@ray.remote(num_cpus=0)
def devices_and_niceness() -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.nice(0)


def test_workers_on_a_cpu_see_no_gpu_and_stand_back_behind_nobody(cluster: Processes) -> None:
    assert ray.get(devices_and_niceness.remote(), timeout=120) == ("", os.nice(0))


def test_nothing_is_uploaded_to_the_nodes(cluster: Processes) -> None:
    """Neither code nor the working directory, which holds checkpoints; under `uv run` Ray would send it by default."""
    assert set(ray.get_runtime_context().runtime_env) <= {"env_vars"}
    assert not ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


def test_ray_does_not_measure_free_memory(cluster: Processes) -> None:
    """It would refuse to start where little is free, though no actor asks for any."""
    assert ray.cluster_resources()["memory"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_raylet_is_told_where_its_agents_listen(cluster: Processes) -> None:
    """It ends where it has waited 15 s for one that it was not told."""
    (raylet,) = (child for child in psutil.Process().children(recursive=True) if child.name() == "raylet")
    told = dict(word.lstrip("-").replace("-", "_").partition("=")[::2] for word in raylet.cmdline())
    names = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")
    assert len({told[name] for name in names}) == 4
    assert all(20000 <= int(told[name]) < 32000 for name in names)
    # Ray's own functions are in their places again.
    assert {services.start_raylet.__module__, services.start_ray_process.__module__} == {services.__name__}


@ray.remote(num_cpus=0)
class Dying:
    def die(self) -> None:
        print("no more room", file=sys.stderr)
        os._exit(9)


def test_the_last_words_of_an_actor_that_died(cluster: Processes) -> None:
    with pytest.raises(WorkerError, match=r"(?s)^rollout worker die: the process died: .*  \| no more room$"):
        values_of("rollout worker die", [Dying.remote().die.remote()], 120)


@ray.remote(num_cpus=0)
def never() -> None:
    time.sleep(3600)


def test_a_generation_has_a_limit_of_its_own(cluster: Processes) -> None:
    rollout = HybridRollout.__new__(HybridRollout)
    rollout.judge, rollout.timeout_s = None, 3600.0
    rollout.rollout = RolloutConfig(generation_timeout_s=1.0)
    calls = news, call = never.remote(), never.remote()
    rollout.workers = RolloutWorkers([], [], 3600.0)
    rollout.workers.news = {news: 0}
    try:
        with pytest.raises(WorkerError, match=r"actor_rollout_ref\.rollout\.generation_timeout_s=1 s"):
            rollout._attend({0: call})
    finally:
        for one in calls:
            ray.cancel(one, force=True)


class Worker(Reusable):
    """In the place of a rollout worker: leaving takes it that many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def leave(self) -> None:
        time.sleep(self.seconds)
        super().leave()


def test_a_rollout_worker_that_hangs_does_not_keep_a_run_from_its_restart(
    cluster: Processes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, of which one hangs, both end: the next start of the run has others."""
    monkeypatch.setattr(rollout_workers, "LEAVE_TIMEOUT_S", 10.0)
    with (
        pytest.raises(WorkerError, match="a rank is lost"),
        Lease(cluster, survives=lambda error, pools: True) as lease,
    ):
        pool = lease.pool(nnodes=1, devices_per_node=1, device="cpu", timeout_s=120.0)
        spec = ActorSpec(Worker, 0, 0.0)
        started = [pool.start(spec, {"max_restarts": 0}, seconds) for seconds in (0.0, 3600.0)]
        workers = RolloutWorkers(started, [range(1), range(1, 2)], 3600.0)
        lease.add(workers)
        workers.wait_ready()
        raise WorkerError("a rank is lost")
    assert "RolloutWorkers does not get ready for another run" in caplog.text
    assert "rollout workers [1] did not leave within 10 s" in caplog.text
    for worker in workers.handles:
        assert_ends(worker)


def assert_ends(worker: Any, timeout_s: float = 60.0) -> None:
    """One that has left already may still answer for a moment, with an error of its own."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get(worker.leave.remote(), timeout=timeout_s)
        except RayActorError:
            return
        except RayTaskError:
            time.sleep(0.1)
    raise AssertionError(f"{worker} answers {timeout_s} s after its end")
