"""The directory of a local Ray, its token, and the signal handlers that its start replaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerl.base.scratch import remove_abandoned
from scalerl.cluster.ray_session import PREFIX, own_token, session_directory, sigterm_kept
from scalerl.errors import UserError


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


def test_kept_logs_have_no_colours(tmp_path: Path) -> None:
    """What Ray writes for a terminal is text in a file; a file that is no text stays as it is."""
    binary = b"\0\x1b[1m\n\xff"
    with pytest.raises(RuntimeError), session_directory(tmp_path / "logs", parent=tmp_path) as directory:
        write_logs(directory)
        logs = directory / "session_1" / "logs"
        (logs / "old").mkdir()
        (logs / "old" / "driver.log").write_bytes(
            b"\x1b[33m(raylet)\x1b[0m no [33m\r\n\x1b[1;36mnode \xc3\xa4\x1b[0m\x1b[K"
        )
        (logs / "state").write_bytes(binary)
        raise RuntimeError
    assert (tmp_path / "logs" / "old" / "driver.log").read_bytes() == b"(raylet) no [33m\r\nnode \xc3\xa4"
    assert (tmp_path / "logs" / "state").read_bytes() == binary


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
