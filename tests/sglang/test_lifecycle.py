"""Servers that do not start, and servers whose owner is killed."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.process import (
    RolloutServer,
    ServerArgumentsError,
    ServerNotReadyError,
    ServerStartError,
    free_port,
    reserved_port,
    start_on_free_port,
)
from scalerl.rollout.servers.supervise import descendants
from tests.lanes import full
from tests.sglang.conftest import MAX_MODEL_LEN, Model, make_server, server_info

REPOSITORY = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", [full("sglang"), "embedded"])
def test_a_server_that_dies_at_start_shows_its_own_last_words(kind: str, model_a: Model, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    config = json.loads((model_a.path / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "qwen3", "num_hidden_layers": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((model_a.path / name).read_bytes())  # all but the weights
    with pytest.raises(ServerStartError) as raised:
        start_on_free_port(lambda port: make_server(kind, broken, tmp_path / "server.log", port))
    message = str(raised.value)
    assert "before it was ready" in message
    assert "weights" in message or "safetensors" in message
    assert "--model-path" in message  # what was started
    log = [line.rstrip() for line in (tmp_path / "server.log").read_text().splitlines() if line.strip()]
    assert f"  | {log[-1]}" in message


def test_a_server_that_never_answers_is_stopped_at_the_deadline(tmp_path: Path) -> None:
    server = RolloutServer(["sleep", "1000"], {}, "http://127.0.0.1:9", tmp_path / "log")
    server.start()
    with pytest.raises(ServerNotReadyError, match="start_timeout_s"):
        server.start_timeout_s = 1.0
        server.wait_ready()
    assert not server.alive()


def test_a_port_that_got_taken_is_replaced(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, http.server
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self): self.send_response(200); self.end_headers()
        http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
        """
    )
    ports: list[int] = []

    def make(port: int) -> RolloutServer:
        ports.append(port)
        # The first server is told a port that another program took after it was chosen.
        taken = held if len(ports) == 1 else port
        return RolloutServer(
            [sys.executable, "-c", program, str(taken)], {}, f"http://127.0.0.1:{port}", tmp_path / f"{port}.log"
        )

    with reserved_port() as held, contextlib.ExitStack() as stack:
        server = stack.enter_context(start_on_free_port(make))
        assert len(ports) == 2
        assert server.url.endswith(str(ports[1]))
        with reserved_port() as other:
            assert other != ports[1]


class Answering(http.server.BaseHTTPRequestHandler):
    """As any server that is well answers GET /health."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def silent_program(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


@contextlib.contextmanager
def answering_program(port: int) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.full
def test_ports_that_are_taken_between_reservation_and_bind_are_left_to_who_took_them(
    model_a: Model, tmp_path: Path
) -> None:
    """The first by a program that says nothing, the second by one that answers as another job's server would."""
    ports: list[int] = []
    takers = [silent_program, answering_program]
    with contextlib.ExitStack() as held:

        def make(port: int) -> RolloutServer:
            ports.append(port)
            server = make_server("embedded", model_a.path, tmp_path / f"{port}.log", port)
            if takers:
                take, start = takers.pop(0), server.start

                def start_too_late() -> None:
                    held.enter_context(take(port))
                    start()

                server.start = start_too_late
            return server

        with start_on_free_port(make) as server:
            assert len(set(ports)) == 3
            assert server.url == f"http://127.0.0.1:{ports[-1]}"
            client = RolloutClient(server.url, "embedded", key=server.key, max_model_len=MAX_MODEL_LEN)
            assert server_info(client)["version"] == "embedded"
    for port in ports[:2]:
        assert "Address already in use" in (tmp_path / f"{port}.log").read_text()


# A tree as SGLang makes it: children, a grandchild, and a daemon that left the session.
DUMMY_TREE = """
import os, subprocess, sys, time
def report(): open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
report()
for _ in range(2):
    if os.fork() == 0:
        report()
        if os.fork() == 0:
            report()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    report()
                    time.sleep(1000)
                os._exit(0)
            time.sleep(1000)
        time.sleep(1000)
END
"""
TREE_SIZE = 7


def dummy_tree(tmp_path: Path, ending: str) -> tuple[list[str], Path]:
    pids = tmp_path / "pids"
    return [sys.executable, "-c", DUMMY_TREE.replace("END", ending), str(pids)], pids


def reported(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


def supervised_owner(command: list[str], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that starts `command` as a RolloutServer and then only sleeps."""
    program = (
        "import pathlib, sys, time\n"
        "from scalerl.rollout.servers.process import RolloutServer\n"
        f"log = pathlib.Path({str(log)!r})\n"
        f"server = RolloutServer({command!r}, {env or {}!r}, 'http://127.0.0.1:9', log)\n"
        "server.start()\n"
        "time.sleep(1000)\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)


def test_killing_the_owner_leaves_no_process(tmp_path: Path) -> None:
    command, pids = dummy_tree(tmp_path, "time.sleep(1000)")
    owner = supervised_owner(command, tmp_path / "log")
    wait_for(lambda: len(reported(pids)) == TREE_SIZE)
    assert all(alive(pid) for pid in reported(pids))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not any(alive(pid) for pid in reported(pids)))


@pytest.mark.parametrize(("ending", "code"), [("time.sleep(0.5); sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_a_command_that_ends_takes_its_tree_along_and_gives_its_code(tmp_path: Path, ending: str, code: int) -> None:
    command, pids = dummy_tree(tmp_path, ending)
    server = RolloutServer(command, {}, "http://127.0.0.1:9", tmp_path / "log")
    server.start()
    with pytest.raises(ServerNotReadyError, match=f"exit code {code}"):
        server.start_timeout_s = 60.0
        server.wait_ready()
    assert not any(alive(pid) for pid in reported(pids))


def test_stop_and_the_supervisors_death_leave_no_process(tmp_path: Path) -> None:
    command, pids = dummy_tree(tmp_path, "time.sleep(1000)")
    server = RolloutServer(command, {}, "http://127.0.0.1:9", tmp_path / "log")
    server.start()
    wait_for(lambda: len(reported(pids)) == TREE_SIZE)
    server.stop()
    assert not any(alive(pid) for pid in reported(pids))
    server.stop()


def test_a_command_that_cannot_start_says_so(tmp_path: Path) -> None:
    server = RolloutServer(["/no/such/program"], {}, "http://127.0.0.1:9", tmp_path / "log")
    server.start()
    with pytest.raises(ServerNotReadyError, match="cannot start /no/such/program"):
        server.start_timeout_s = 60.0
        server.wait_ready()


@pytest.mark.parametrize(
    ("kind", "arguments", "last_words"),
    [
        pytest.param("sglang", "--no-such-option", "no-such-option", marks=pytest.mark.full),
        # Each is right by itself: what SGLang's parser takes is refused when it is resolved, and when it is checked.
        pytest.param(
            "sglang", "--enable-hierarchical-cache --disable-radix-cache", "mutually exclusive", marks=pytest.mark.full
        ),
        pytest.param(
            "sglang",
            "--page-size 64 --chunked-prefill-size 10",
            "must be divisible by page_size",
            marks=pytest.mark.full,
        ),
        ("embedded", "--no-such-option", "no-such-option"),
    ],
)
def test_a_refused_argument_is_the_users_error(
    kind: str, arguments: str, last_words: str, model_a: Model, tmp_path: Path
) -> None:
    server = make_server(kind, model_a.path, tmp_path / "log", 9)
    server.command = [*server.command, *arguments.split()]
    server.start()
    with pytest.raises(ServerArgumentsError, match=f"(?s)exit code 2 .*{last_words}") as caught:
        server.start_timeout_s = 120.0
        server.wait_ready()
    assert f"  | {server.log_tail()[-1]}" in str(caught.value)


@pytest.mark.full
def test_killing_the_owner_of_a_real_sglang_server_leaves_no_process(model_a: Model, tmp_path: Path) -> None:
    server = make_server("sglang", model_a.path, tmp_path / "log", free_port("127.0.0.1"))
    owner = supervised_owner(server.command, tmp_path / "log", server.env)
    # In the middle of the start, when SGLang has just spawned its processes: they cannot clean up after themselves yet.
    wait_for(lambda: len(descendants(owner.pid)) >= 4, timeout_s=120.0)
    processes = descendants(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: not any(alive(pid) for pid in processes))


# A server that has in /dev/shm what SGLang has there, and a file of others open.
SHARER = """
import os, subprocess, sys, tempfile, time
own, tag = os.getpid(), sys.argv[1]
open(tempfile.mkstemp()[1], "w").close()
loads = f"sglang_loads_{os.environ['SCALERL_SERVER_ID']}_{tag}.shm"
for name in (f"sem.loky-{own}-{tag}", f"sgl_shm_mq_{own}_{tag}", loads):
    open(f"/dev/shm/{name}", "w").close()
held = open(f"/dev/shm/weights-of-others-{tag}", "w")
print("ready", tempfile.gettempdir(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("ending", ["stop", "owner killed", "server killed"])
def test_nothing_is_left_of_a_server(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, tag = Path("/dev/shm"), uuid.uuid4().hex
    temporary, log = tmp_path / "tmp", tmp_path / "log"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    others = [shared / f"{name}{tag}" for name in ("weights-of-others-", "sem.loky-1-", "sglang_loads_000000000000_")]
    for other in others:
        other.touch()
    command = [sys.executable, "-S", "-c", SHARER, tag]
    try:
        owner = supervised_owner(command, log)
        wait_for(lambda: log.exists() and log.read_text().startswith("ready"))
        assert Path(log.read_text().split()[1]).parent == temporary
        assert len([path for path in shared.iterdir() if tag in path.name]) == 3 + len(others)
        below = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(owner.pid)}
        (supervisor,) = [pid for pid, line in below.items() if b"scalerl.rollout.servers.supervise" in line]
        if ending == "server killed":
            for pid in descendants(supervisor):
                os.kill(pid, signal.SIGKILL)
        elif ending == "owner killed":
            owner.kill()
        else:
            os.kill(supervisor, signal.SIGTERM)
        wait_for(lambda: not alive(supervisor))
        owner.kill()
        owner.wait()
        assert sorted(path for path in shared.iterdir() if tag in path.name) == sorted(others)
        assert list(temporary.iterdir()) == []
    finally:
        for path in shared.glob(f"*{tag}*"):
            path.unlink()
