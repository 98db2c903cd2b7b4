"""What is read of a reference server's answer, and how long one that does not answer is asked again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scalerl.config.schema.actor import RefConfig
from scalerl.errors import UserError
from scalerl.rollout.servers import reference
from scalerl.rollout.servers.reference import ReferenceServer, ReferenceServerError, Scores

IDS = [5, 6, 7]
WORDS = [None, [[-0.5, 6, None], [-1.5, 2, None]], [[-0.1, 1, None], [-3.0, 7, None]]]
ABOUT: dict[str, Any] = {
    "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-3.0, 7, None]],
    "input_top_logprobs": WORDS,
}


def test_an_answer_is_read() -> None:
    expected = Scores([0.0, -0.5, -3.0], [[0, 0], [6, 2], [1, 7]], [[0.0, 0.0], [-0.5, -1.5], [-0.1, -3.0]])
    assert Scores.of(ABOUT, IDS, 2) == expected
    assert Scores.of(ABOUT, IDS, 0) == Scores([0.0, -0.5, -3.0], [], [])
    one = {"input_token_logprobs": [[None, 5, None]], "input_top_logprobs": [None]}
    assert Scores.of(one, [5], 2) == Scores([0.0], [[0, 0]], [[0.0, 0.0]])
    # SGLang calls the last word of a vocabulary 0.
    last = {"input_token_logprobs": [[None, 5, None], [-2.0, 0, None]]}
    assert Scores.of(last, [5, 511], 0) == Scores([0.0, -2.0], [], [])


@pytest.mark.parametrize(
    ("about", "ids", "top_k"),
    [
        (ABOUT, [5, 6], 0),
        (ABOUT, [5, 6, 8], 0),
        (ABOUT, IDS, 3),
        (ABOUT | {"input_top_logprobs": WORDS[:2]}, IDS, 2),
        (ABOUT | {"input_token_logprobs": [[None, 5, None], [None, 6, None], [-3.0, 7, None]]}, IDS, 0),
        ({}, IDS, 0),
    ],
    ids=["too many", "others", "fewer words", "too few words", "no number", "nothing"],
)
def test_another_answer_is_refused(about: dict[str, Any], ids: list[int], top_k: int) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Scores.of(about, ids, top_k)


@contextmanager
def answering(answers: list[tuple[int, str]], asked: list[Any]) -> Iterator[str]:
    """The address of something before a server, as a balancer of load: its answers in order, the last one again."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body), self.headers.get("Authorization")))
            status, text = answers[min(len(asked), len(answers)) - 1]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/prefix"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


GOOD = (200, json.dumps({"meta_info": ABOUT}))


@pytest.mark.parametrize(
    ("answers", "retry_s", "num_asked", "message"),
    [
        ([(503, "busy"), (429, "{}"), GOOD], 60.0, 3, None),
        ([(400, '{"error": {"message": "too long"}}'), GOOD], 60.0, 1, "status 400: too long"),
        ([(503, "busy"), GOOD], 0.0, 1, "status 503: busy"),
        ([(200, "no json"), GOOD], 0.0, 1, "no JSON"),
        ([(200, "[]")], 60.0, 1, "not what was asked for"),
    ],
)
def test_who_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, answers: list, retry_s: float, num_asked: int, message: str | None
) -> None:
    monkeypatch.setattr(reference, "FIRST_WAIT_S", 0.0)
    asked: list[Any] = []
    with answering(answers, asked) as url:
        ask = partial(ReferenceServer(url, "k").scores, IDS, 2, name="x", retry_s=retry_s)
        if message is None:
            assert ask() == Scores.of(ABOUT, IDS, 2)
        else:
            with pytest.raises(ReferenceServerError, match=f"reference server {url}, x: {message}"):
                ask()
    assert len(asked) == num_asked
    path, body, authorization = asked[0]
    assert path == "/prefix/generate" and authorization == "Bearer k" and body["input_ids"] == IDS
    assert body["sampling_params"]["temperature"] == 1.0 and body["top_logprobs_num"] == 2


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RefConfig(url="https://teacher:1/", api_key_env="TEACHER_KEY")
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UserError, match="api_key_env = TEACHER_KEY: the environment has no such variable; export"):
        ReferenceServer.of(config)
    monkeypatch.setenv("TEACHER_KEY", "secret")
    server = ReferenceServer.of(config)
    assert server == ReferenceServer("https://teacher:1", "secret") and "secret" not in repr(server)
    assert ReferenceServer.of(RefConfig()) is None
