"""What a person reads where Ray does not start."""

from __future__ import annotations

import re
import socket
import threading
import time
from pathlib import Path

import pytest

from scalerl.cluster import ray_start
from scalerl.cluster.ray_start import RayStartError, one_machine_violations, start_explained, wait_for_head
from scalerl.config import compose
from scalerl.errors import EXIT_FAILED, EXIT_USER_ERROR, RunError, UserError, run_main

LOGS = Path("/run/logs/ray")
# Of Ray 2.60, where a part of it does not come up.
TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup."
WITH_STACK = (
    "Failed to start GCS.  Last 1 lines of error files:\n[gcs_server C] no room\n.Please check gcs_server.out for "
    'details. Last connection error: Traceback (most recent call last):\n  File "node.py", line 1, in start\nTimeout'
)


def message(error: BaseException, directory: Path, logs_to: Path | None, address: str | None) -> str:
    with pytest.raises(RayStartError) as raised, start_explained(directory, logs_to, address):
        raise error
    assert raised.value.__cause__ is error
    return str(raised.value)


def test_it_says_how_full_the_machine_is_and_where_the_logs_are(tmp_path: Path) -> None:
    said = message(Exception(TIMED_OUT), tmp_path, LOGS, None)
    assert re.match(r"Ray did not start on \S+: " + re.escape(TIMED_OUT), said)
    number = r"\d+\.\d+"
    assert re.search(rf"a load of {number} on \d+ cores; {number} of {number} GiB of memory; ", said)
    for place in ("/dev/shm", re.escape(str(tmp_path))):
        assert re.search(rf"{number} of {number} GiB in {place}, ", said)
    assert f"Ray's logs: {LOGS} " in said
    assert "logs" not in message(Exception(TIMED_OUT), tmp_path, None, None)


def test_a_stack_that_ray_puts_into_its_message_is_left_out(tmp_path: Path) -> None:
    said = message(RuntimeError(WITH_STACK), tmp_path, None, None)
    assert "Traceback" not in said and "node.py" not in said and "Last connection error" not in said
    assert "no room" in said and "gcs_server.out" in said


def test_a_cluster_that_is_not_joined_is_named(tmp_path: Path) -> None:
    said = message(ConnectionError("Failed to connect"), tmp_path, None, "head:6379")
    assert "RAY_ADDRESS = head:6379" in said and "Failed to connect" in said and "GiB" not in said


def test_a_directory_that_ray_cannot_use_is_the_users_error(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"/absent: no such directory.*RAY_TMPDIR"),
        start_explained(tmp_path / "absent", None, None),
    ):
        raise AssertionError
    long = OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long")
    with pytest.raises(UserError, match="shorter path"), start_explained(tmp_path, None, None):
        raise long


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(15), UserError("set the key")])
def test_a_signal_and_a_users_error_pass(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, start_explained(tmp_path, LOGS, None):
        raise error
    assert raised.value is error


def test_the_exit_code_says_that_another_try_may_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def start(error: Exception) -> None:
        with start_explained(tmp_path, None, None):
            raise error

    assert run_main(start, Exception(TIMED_OUT)) == EXIT_FAILED
    assert capsys.readouterr().err.startswith("error: Ray did not start on ")
    assert run_main(start, UserError("set the key")) == EXIT_USER_ERROR
    assert issubclass(RayStartError, RunError)


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1", "127.0.0.1"])
def test_other_forms_of_an_address_are_rays_to_find(address: str) -> None:
    wait_for_head(address)


def test_a_head_that_is_not_there_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "REACH_S", 0.5)
    with pytest.raises(ConnectionError, match=r"nothing takes a connection there \(.*refused\), tried for 0.5 s"):
        wait_for_head("127.0.0.1:1")


def test_a_head_that_still_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "_LOOK_S", 0.05)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        late = threading.Timer(0.3, head.listen)
        began = time.monotonic()
        late.start()
        wait_for_head(f"127.0.0.1:{head.getsockname()[1]}")
        assert time.monotonic() - began >= 0.25
        late.join()


def test_several_nodes_without_a_cluster_to_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    needed = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=1"]
    pool = "actor_rollout_ref.rollout.resource_pool"
    nodes = [
        "trainer.nnodes=2",
        "actor_rollout_ref.hybrid_engine=false",
        f"{pool}.nnodes=3",
        f"{pool}.n_gpus_per_node=1",
    ]
    cfg = compose("ppo", [*needed, *nodes], rules=False)
    said = list(one_machine_violations(cfg))
    assert [text.partition(":")[0] for text in said] == ["trainer.nnodes = 2", f"{pool}.nnodes = 3"]
    assert all("RAY_ADDRESS" in text and "docs/clusters.md" in text and "scalerl launch slurm" in text for text in said)
    # A pool is on one machine beside others.
    assert list(one_machine_violations(compose("ppo", [*needed, *nodes[1:2], f"{pool}.nnodes=1"], rules=False))) == []
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert list(one_machine_violations(cfg)) == []
