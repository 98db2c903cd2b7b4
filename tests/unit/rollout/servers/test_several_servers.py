"""All servers are asked at the same time; one that refuses is told by its index; only what was asked for is undone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scalerl.rollout.servers.client import ClientSettings, Replica
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.server_set import Clients, are_well, continue_generation, pause, small_caches

NUM_SERVERS = 3
TOGETHER_S = 20.0


class Server(ThreadingHTTPServer):
    """Answers a command when as many servers as `together` counts have got one."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.together: threading.Barrier | None = together
        self.asked: list[str] = []
        self.refuses = False

    @property
    def replica(self) -> Replica:
        return Replica(f"http://127.0.0.1:{self.server_address[1]}", "sglang", 1, "a key")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(" ".join([self.path, *body.get("tags", [])]))
        if self.server.together is not None:
            self.server.together.wait(TOGETHER_S)
        self._answer(500 if self.server.refuses else 200)

    def do_GET(self) -> None:
        if self.server.together is not None:
            self.server.together.wait(TOGETHER_S)
        self._answer(503 if self.server.refuses else 200, b'{"max_total_num_tokens": 48, "page_size": 16}')

    def _answer(self, status: int, body: bytes = b"{}") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    together = threading.Barrier(NUM_SERVERS)
    with ExitStack() as stack:
        started = [stack.enter_context(Server(together)) for _ in range(NUM_SERVERS)]
        for server in started:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield started


@pytest.fixture
def clients(servers: list[Server]) -> Clients:
    settings = ClientSettings(POLICY, max_model_len=100, timeout_s=TOGETHER_S, max_concurrency=1)
    return {index: settings.client(server.replica) for index, server in enumerate(servers)}


def asked(servers: list[Server]) -> list[list[str]]:
    requests = [list(server.asked) for server in servers]
    for server in servers:
        server.asked.clear()
    return requests


def test_all_are_asked_at_the_same_time(servers: list[Server], clients: Clients) -> None:
    assert pause(clients) == {}
    assert continue_generation(clients) == {}
    assert asked(servers) == [["/pause_generation", "/continue_generation"]] * NUM_SERVERS
    assert continue_generation(clients) == {}
    assert asked(servers) == [[]] * NUM_SERVERS, "nothing was paused"


def test_the_sizes_of_all_caches_are_asked_at_the_same_time(clients: Clients) -> None:
    # A configured size is rounded down to whole pages.
    assert list(small_caches(clients, 63)) == []
    said = [f"rollout server {index}" for index in range(NUM_SERVERS)]
    assert [sentence.split(" (")[0] for sentence in small_caches(clients, 64)] == said


def test_one_that_refuses_is_named(servers: list[Server], clients: Clients) -> None:
    servers[1].refuses = True
    failed = pause(clients)
    assert list(failed) == [1] and servers[1].replica.url in failed[1]


def test_a_release_waits_for_an_idle_scheduler_and_what_was_released_comes_back(servers: list[Server]) -> None:
    server = servers[0]
    server.together = None
    client = ClientSettings(POLICY, 100, TOGETHER_S, 1).client(server.replica)
    tags = client.engine.memory_tags
    client.release(tags["kv_cache"])
    client.release(tags["weights"])
    client.resume(tags["weights"])
    client.resume(tags["kv_cache"])
    kv, weights = (
        [f"/{verb}_memory_occupation {tags}" for verb in ("release", "resume")]
        for tags in ("kv_cache", "weights cuda_graph")
    )
    # A scheduler that is still busy with the last sample would die of the release.
    assert server.asked == ["/flush_cache?timeout=10", kv[0], *weights, kv[1]]


def test_health_is_asked_of_those_that_are_named(clients: Clients, servers: list[Server]) -> None:
    servers[2].shutdown()
    servers[2].server_close()
    servers[0].together = None
    assert are_well({index: clients[index] for index in (0, 2)}) == {0: True, 2: False}
