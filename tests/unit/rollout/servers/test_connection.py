"""A server is asked directly, whatever proxy the environment names, and with a watch on its machine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scalerl.rollout.servers.client import RolloutClient, RolloutError
from scalerl.rollout.servers.connection import KEEP_ALIVE, WatchedConnection, ask

asked: list[tuple[str, str, bytes]] = []


class Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked.append((self.command, self.path, body))
        text = b'{"success": true}'
        self.send_response(503 if self.path == "/pause_generation" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a site whose proxy does not reach the cluster's nodes."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("proxied")
def test_no_proxy_is_between(url: str) -> None:
    client = RolloutClient(url, "sglang", key="key", max_model_len=64)
    assert asyncio.run(client.is_well())
    client.flush_cache(wait_s=5)
    assert asked == [("GET", "/server_info", b""), ("POST", "/flush_cache?timeout=5", b"{}")]


def test_refused_and_gone_are_errors_that_name_the_server(url: str) -> None:
    client = RolloutClient(url, "sglang", key="key", max_model_len=64)
    with pytest.raises(RolloutError, match=rf"{url}/pause_generation refused \(HTTP 503\)"):
        client.pause()
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RolloutError, match=rf"{gone}/pause_generation got no answer: .*refused"):
            RolloutClient(gone, "sglang", key="key", max_model_len=64).pause()


def test_its_machine_is_watched_and_itself_has_the_whole_time(url: str) -> None:
    """What the kernel makes of it: tests/slurm/test_multi_node_server.py."""
    connection = WatchedConnection(url.removeprefix("http://"), timeout=600)
    connection.connect()
    try:
        made = connection.sock
        assert made.gettimeout() == 600
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = {name: getattr(socket, name) for name in KEEP_ALIVE if hasattr(socket, name)}
        assert {name: made.getsockopt(socket.IPPROTO_TCP, option) for name, option in options.items()} == {
            name: KEEP_ALIVE[name] for name in options
        }
    finally:
        connection.close()


def test_the_answer_has_its_status(url: str) -> None:
    assert ask(f"{url}/anything", headers={}, timeout_s=60) == (200, '{"success": true}')
    assert ask(f"{url}/pause_generation", "POST", b"{}", headers={}, timeout_s=60)[0] == 503
