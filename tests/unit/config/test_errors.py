"""A user's error is one message and exit code 2; a defect keeps its stack."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from scalerl.config import ConfigError
from scalerl.errors import UserError, run_main


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
    ],
    ids=["user", "config", "file", "file-text", "remote-config", "remote"],
)
def test_user_errors(capsys, monkeypatch, error, message):
    monkeypatch.delenv("SCALERL_TRACEBACK", raising=False)
    assert run_main(fail, error) == 2
    assert capsys.readouterr() == ("", message)


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
