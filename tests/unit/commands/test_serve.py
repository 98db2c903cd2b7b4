"""`scalerl serve` refuses what cannot be served, or would be open to others, before a server starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from scalerl.commands import chat
from scalerl.commands.serve import API_KEY, main
from scalerl.errors import UserError
from scalerl.rollout.servers.process import RolloutServer
from tests.tiny_models import make_tiny_model


def test_another_machine_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(UserError, match=f"--host {host}.*{API_KEY}"):
            main([str(tmp_path), "--host", host])


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: cannot be listened on.*give another --port"):
            main([str(tmp_path), "--port", str(port)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "4096"], "--context 4096: .* 2048 positions; give 8 to 2048"),
        (["--tp", "3"], r"--tp = 3"),
    ],
)
def test_what_the_model_does_not_allow(tmp_path: Path, options: list[str], message: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(UserError, match=message):
        main([str(model), "--port", "0", "--device", "cpu", *options])


def test_yarn_gives_a_model_more_positions(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 10_000.0}
    model = make_tiny_model(tmp_path / "model", rope_parameters=yarn)
    with pytest.raises(UserError, match=r"--context 8193: .* 8192 positions; give 8 to 8192"):
        main([str(model), "--port", "0", "--device", "cpu", "--context", "8193"])


@pytest.mark.parametrize(("options", "start_timeout_s"), [([], 600.0), (["--start-timeout-s", "7"], 7.0)])
def test_a_server_may_take_as_long_to_start_as_the_option_says_that_its_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], start_timeout_s: float
) -> None:
    class Asked(Exception):
        pass

    def no_start(server: RolloutServer) -> None:
        raise Asked(server.start_timeout_s, server.purpose.key("start_timeout_s"))

    monkeypatch.setattr(RolloutServer, "start", no_start)
    with pytest.raises(Asked) as asked:
        main([str(make_tiny_model(tmp_path / "model")), "--port", "0", "--device", "cpu", *options])
    assert asked.value.args == (start_timeout_s, "--start-timeout-s")


def test_nobody_answers_a_question() -> None:
    with pytest.raises(UserError, match=r"^no server answers at \S+ \(\[Errno \d+\] Conn[^<>]*\); start"):
        chat.main(["--url", "http://127.0.0.1:1", "hello"])


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model with a readable config\.json"):
        main([str(tmp_path), "--port", "0"])
