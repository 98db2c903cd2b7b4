"""`scalerl chat ["question"]`: talk with a model that `scalerl serve`, or any OpenAI-compatible server, serves."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from scalerl.commands.serve import API_KEY, DEFAULT_PORT, add_server_options, serving
from scalerl.errors import CommandParser, RunError, UserError
from scalerl.rollout.servers.process import free_port

ANSWER_TIMEOUT_S = 600.0
NEW = "/new"
HELP = f"Ctrl-D ends, {NEW} starts a new conversation."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Raises UserError when no server answers or it refuses a request, RunError when an answer breaks off.
    """
    arguments = build_parser().parse_args(argv)
    messages = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    sampling = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    with _server(arguments) as url:
        server = ChatServer(url, {name: value for name, value in sampling.items() if value is not None})
        if arguments.question is not None:
            _answer(server, [*messages, {"role": "user", "content": arguments.question}])
        else:
            _talk(server, messages)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = CommandParser(prog="scalerl chat", description=__doc__)
    parser.add_argument("question", nargs="?", help="answered once; without it a conversation begins")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", help="address of the server (default %(default)s)"
    )
    where.add_argument("--model", metavar="DIR", help="serve this model directory while this command runs")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, help="0: always the likeliest token; default: the server's")
    parser.add_argument("--max-tokens", type=int, help="limit of an answer; default: the rest of the context")
    add_server_options(parser)
    return parser


@contextlib.contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.model is None:
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    arguments.host = "127.0.0.1"
    arguments.port = free_port(arguments.host)
    print(f"starting a server of {arguments.model} ...", file=sys.stderr, flush=True)
    with serving(arguments) as server:
        yield server.url


class ChatServer:
    """The first model of an OpenAI-compatible server. sampling: fields that are added to each request."""

    def __init__(self, url: str, sampling: dict[str, float]) -> None:
        self.url, self.sampling = url, sampling
        with self._open("/v1/models", None) as response:
            self.model = json.load(response)["data"][0]["id"]

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yields the model's answer to the messages, piece by piece.  Raises RunError for an error within it."""
        body = {"model": self.model, "messages": messages, "stream": True, **self.sampling}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if error := event.get("error"):
                    raise RunError(f"{self.url}: {error.get('message', error)}")
                if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
                    yield piece

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            advice = f"; set {API_KEY} to the key that it was started with" if error.code in (401, 403) else ""
            raise UserError(f"{self.url} answers {error.code}: {said}{advice}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UserError(f"no server answers at {self.url} ({reason}); start one: scalerl serve MODEL") from None


def _talk(server: ChatServer, system: list[dict[str, str]]) -> None:
    print(f"{server.model} at {server.url}. {HELP}", flush=True)
    messages = list(system)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == NEW:
            messages = list(system)
        elif question:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": _answer(server, messages)})


def _answer(server: ChatServer, messages: list[dict[str, str]]) -> str:
    """Prints the answer as it arrives, and returns it.  Raises RunError when it breaks off."""
    pieces = []
    try:
        for piece in server.answer(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except (OSError, http.client.HTTPException) as error:
        raise RunError(f"{server.url}: the answer broke off ({error})") from None
    finally:
        print(flush=True)
    return "".join(pieces)
