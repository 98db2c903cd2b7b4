"""A user's error is one message and exit code 2, one of what a run is made of 70; a defect keeps its stack."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray.exceptions import RayTaskError

from scalerl.cluster.failures import WorkerError
from scalerl.cluster.pools import ResourceError
from scalerl.config import ConfigError
from scalerl.errors import UserError, run_main
from scalerl.rollout.servers.process import ServerArgumentsError, ServerNotReadyError
from scalerl.rollout.servers.requests import RolloutError, ServerLostError


def remote(cause: Exception) -> Exception:
    """What `ray.get` raises when a worker raised `cause`."""
    return RayTaskError("worker", "Traceback (most recent call last): ...", cause).as_instanceof_cause()


def fail(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("data.parquet: row 3: no prompt; add one"), "error: data.parquet: row 3: no prompt; add one\n"),
        (ConfigError(["a = 1: wrong"]), "error: The configuration has 1 problem:\n  1. a = 1: wrong\n"),
        (FileNotFoundError(2, "No such file or directory", "f.py"), "error: f.py: No such file or directory\n"),
        (FileNotFoundError("no reward function at f.py"), "error: no reward function at f.py\n"),
        (remote(ConfigError(["a = 1: wrong"])), "error: The configuration has 1 problem:\n  1. a = 1: wrong\n"),
        (remote(UserError("reward is NaN")), "error: reward is NaN\n"),
        (remote(ServerArgumentsError("no option --foo")), "error: no option --foo\n"),
    ],
    ids=["user", "config", "file", "file-text", "remote-config", "remote", "remote-server"],
)
def test_user_errors(capsys, monkeypatch, error, message):
    monkeypatch.delenv("SCALERL_TRACEBACK", raising=False)
    assert run_main(fail, error) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("kind", [WorkerError, ResourceError, RolloutError, ServerLostError, ServerNotReadyError])
def test_errors_of_what_a_run_is_made_of(capsys, monkeypatch, kind):
    """sysexits.h EX_SOFTWARE: nothing in the input explains them."""
    monkeypatch.delenv("SCALERL_TRACEBACK", raising=False)
    for error in (kind("rank 3 died"), remote(kind("rank 3 died"))):
        assert not isinstance(error, UserError)
        assert run_main(fail, error) == os.EX_SOFTWARE == 70
        assert capsys.readouterr() == ("", "error: rank 3 died\n")


def test_the_stack_on_request(capsys, monkeypatch):
    monkeypatch.setenv("SCALERL_TRACEBACK", "1")
    assert run_main(fail, UserError("bad row")) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "in fail" in err and err.endswith("error: bad row\n")


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), AssertionError("x"), remote(ValueError("x"))])
def test_defects_keep_their_stack(error):
    with pytest.raises(type(error)):
        run_main(fail, error)


def test_exit_codes(capsys):
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 0) == 0
    assert run_main(lambda code: code, 3) == 3
    assert run_main(fail, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    with pytest.raises(SystemExit):
        run_main(fail, SystemExit(4))


def test_an_output_that_nobody_reads_ends_a_command_without_a_stack() -> None:
    code = "import sys; from scalerl.errors import run_main; sys.exit(run_main(lambda: print('line\\n' * 100_000)))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stderr is not None
        assert command.stdout.readline() == b"line\n"
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 141


def test_a_connection_that_breaks_is_no_closed_output() -> None:
    def fail() -> None:
        raise BrokenPipeError("a server's socket")

    with pytest.raises(BrokenPipeError, match="socket"):
        run_main(fail)
