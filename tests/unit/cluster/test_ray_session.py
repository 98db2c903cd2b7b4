"""The session of Ray that a run starts: directory, token, handlers, and one error where it does not start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.base.files import remove_abandoned
from scalerl.cluster import ray_session
from scalerl.cluster.ray_session import (
    PREFIX,
    RayStartError,
    one_machine_violations,
    own_token,
    session_directory,
    sigterm_kept,
    start_explained,
    wait_for_head,
)
from scalerl.config import compose
from scalerl.errors import EXIT_FAILED, EXIT_USER_ERROR, RunError, UserError, run_main


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def write_logs(directory: Path) -> None:
    """As Ray does."""
    logs = directory / "session_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("the end\n")
    (directory / "session_latest").symlink_to(directory / "session_1")


def test_nothing_is_left(tmp_path: Path) -> None:
    with session_directory(tmp_path / "logs", parent=tmp_path) as directory:
        assert directory.parent == tmp_path
        write_logs(directory)
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_a_failure_are_kept(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), session_directory(tmp_path / "logs", parent=tmp_path) as directory:
        write_logs(directory)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (tmp_path / "logs" / "worker-1.err").read_text() == "the end\n"


def test_logs_that_cannot_be_kept_do_not_hide_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a disk that is full they cannot; here something is in their way."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(RuntimeError), session_directory(tmp_path / "logs", parent=tmp_path) as directory:
        write_logs(directory)
        raise RuntimeError
    assert f"Ray's logs were not kept in {tmp_path / 'logs'}" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt, SystemExit])
def test_those_of_other_ends_are_not(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), session_directory(tmp_path / "logs", parent=tmp_path) as directory:
        write_logs(directory)
        raise error
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys
from pathlib import Path
from scalerl.cluster.ray_session import session_directory
with session_directory(parent=Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_the_directory_of_a_killed_run_goes_with_the_next(tmp_path: Path) -> None:
    """That of one which runs stays, and what is not ours."""
    other = tmp_path / "scalerl-ray-without-a-lock"
    other.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    directory = Path(holder.stdout.readline().strip())
    write_logs(directory)
    remove_abandoned(PREFIX, tmp_path)
    assert (directory / "session_1").is_dir()
    holder.kill()
    holder.communicate()
    assert directory.is_dir()
    with session_directory(parent=tmp_path):
        assert not directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_each_start_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    tokens = set()
    for _ in range(2):
        with own_token():
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
            # Ray sets it when it starts a cluster.
            os.environ["RAY_AUTH_MODE"] = "token"
        assert not any(name.startswith("RAY_AUTH_") for name in os.environ)
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)


def test_a_token_of_the_user_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with own_token():
        assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")


def test_the_handler_of_sigterm_is_ours_again() -> None:
    def ours(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ours)
    with sigterm_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is ours


def test_a_signal_while_ray_starts_is_ours() -> None:
    def ours(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ours)
    with pytest.raises(KeyboardInterrupt), sigterm_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is ours


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
    monkeypatch.setattr(ray_session, "REACH_S", 0.5)
    with pytest.raises(ConnectionError, match=r"nothing takes a connection there \(.*refused\), tried for 0.5 s"):
        wait_for_head("127.0.0.1:1")


def test_a_head_that_still_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "_LOOK_S", 0.05)
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
