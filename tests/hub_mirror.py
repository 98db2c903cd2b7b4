"""A hub of models and data sets, as a server on this machine that answers what the hub's client asks for."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A mirror of one repository.  files: name -> content.  revisions: names of its commit.

    cut: bytes of the first *.safetensors transfer after which it breaks off.
    says_sha256: of the *.safetensors file; None: its own.
    """

    repo: str
    files: dict[str, bytes]
    kind: Literal["models", "datasets"] = "models"
    url: str = ""
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    cut: int | None = None
    # The weights are not sent before so many clients have asked for them.
    awaited: int = 0
    # (method, path, range) of each request.
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    says_sha256: str | None = None

    def wait_for_clients(self) -> None:
        while (
            sum(method == "HEAD" and path.endswith(".safetensors") for method, path, _ in self.requests) < self.awaited
        ):
            time.sleep(0.01)

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Answers at `url` until the block ends."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def environment(self, home: Path, offline: bool = False) -> dict[str, str]:
        """The environment of a client whose cache is in `home`."""
        names = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS", *(["HF_HUB_OFFLINE"] if offline else []))
        others = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return {**others, "HF_ENDPOINT": self.url, "HF_HOME": str(home), **dict.fromkeys(names, "1")}


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *args) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        hub, path, span = self.hub, unquote(self.path.partition("?")[0]), self.headers.get("Range")
        hub.requests.append((self.command, path, span))
        api = f"/api/{hub.kind}/{hub.repo}"
        files = f"/{hub.repo}/resolve/" if hub.kind == "models" else f"/{hub.kind}/{hub.repo}/resolve/"
        name = path.removeprefix(files).partition("/")[2]
        if path in (f"{api}/revision/{revision}" for revision in hub.revisions):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in hub.files.items()]
            self.send(200, json.dumps({"id": hub.repo, "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files.items()]  # fmt: skip
            self.send(200, json.dumps(tree).encode(), {})
        elif path.startswith(files) and name in hub.files:
            self.send_file(name, span, with_body)
        else:
            code = "RevisionNotFound" if path.startswith(f"{api}/") else "RepoNotFound"
            self.send(404, b"{}", {"X-Error-Code": code})

    def send_file(self, name: str, span: str | None, with_body: bool) -> None:
        hub, data = self.hub, self.hub.files[name]
        is_large = name.endswith(".safetensors")
        etag = (hub.says_sha256 or hashlib.sha256(data).hexdigest()) if is_large else hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if with_body and is_large:
            hub.wait_for_clients()
        if with_body and is_large and hub.cut is not None:
            cut, hub.cut = hub.cut, None
            self.send(206 if span else 200, body[:cut], headers | {"Content-Length": str(len(body))})
            self.close_connection = True
            return
        self.send(206 if span else 200, body if with_body else b"", headers | {"Content-Length": str(len(body))})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
