"""`scalerl serve MODEL`: an OpenAI-compatible SGLang server of a model directory, on GPUs or a CPU; Ctrl-C ends it."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scalerl.config.schema import ServerConfig
from scalerl.config.servers import ROLLOUT_ENGINES
from scalerl.errors import CommandParser, RunError, UserError
from scalerl.models.shape import max_positions
from scalerl.rollout.servers.connection import NO_KEY
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import START_TIMEOUT_S, RolloutServer
from scalerl.rollout.servers.purpose import Purpose

# Environment variable with the key that the server asks for and clients send; unset or empty: no key is needed.
API_KEY = "SCALERL_API_KEY"
DEFAULT_PORT = 8000
# Default limit of prompt and answer in tokens, if the model has as many positions.
CONTEXT = {"cpu": 4096, "cuda": 32768}
# Requests at a time; on a CPU memory for each is taken at the start.
MAX_REQUESTS = {"cpu": 8, "cuda": 256}
POLL_S = 0.5
SERVE = Purpose("the server", None)
ENGINE = next(ENGINES[name] for name, traits in ROLLOUT_ENGINES.items() if traits.answers_openai)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 after Ctrl-C.

    Raises UserError for a model or address that cannot be served, RunError when the server ends by itself.
    """
    arguments = build_parser().parse_args(argv)
    began = time.monotonic()
    with serving(arguments) as server:
        print(_ready(server.url, Path(arguments.model), time.monotonic() - began), flush=True)
        try:
            if (line := _unknown_line(arguments.model, arguments.trust_remote_code)) is not None:
                print(line, flush=True)
            while server.alive():
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            print("stopped", flush=True)
            return 0
        raise RunError(f"the server at {server.url} has gone. {server.end()}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = CommandParser(
        prog="scalerl serve",
        description=__doc__,
        epilog=f"{API_KEY} in the environment: whoever asks must send this key, as a bearer token.",
    )
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory, as scalerl merge writes it")
    parser.add_argument("--host", default="127.0.0.1", help="another one than this machine's own needs a key")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default %(default)s")
    add_server_options(parser)
    return parser


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every command that starts such a server."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    parser.add_argument("--dtype", help="default: float32 on a CPU, else the model's own")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="devices that share the model")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of prompt and answer together")
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        metavar="SECONDS",
        help="default {cpu:.0f} on a CPU, else {cuda:.0f}".format(**START_TIMEOUT_S),
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the model directory brings")


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[RolloutServer]:
    """Starts a server, and yields it when it answers; it ends with the block.

    arguments: as `build_parser` parses them.
    """
    key = os.environ.get(API_KEY, "")
    _check_address(arguments.host, arguments.port, key)
    launch = _launch(arguments)
    url = f"http://{_in_url(arguments.host)}:{arguments.port}"
    with tempfile.TemporaryDirectory(prefix="scalerl-serve-") as logs:
        command, env = ENGINE.command(launch)
        given_s = arguments.start_timeout_s
        timeout_s = START_TIMEOUT_S[launch.device] if given_s is None else given_s
        log = Path(logs) / "server.log"
        server = RolloutServer(command, env, url, log, timeout_s, purpose=SERVE, key=key or NO_KEY)
        with server:
            server.start()
            server.wait_ready()
            yield server


def _check_address(host: str, port: int, key: str) -> None:
    if not key and not _is_own(host):
        raise UserError(
            f"--host {host}: other machines reach it, and there is no key; set {API_KEY}=SECRET in the environment, or "
            "serve on 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: cannot be listened on ({error}); give another --port") from None


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    """A host as a URL has it; 0.0.0.0 and ::, which nobody can connect to, become the loopback address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached


def _launch(arguments: argparse.Namespace) -> Launch:
    from scalerl.cluster.device import resolve_device
    from scalerl.data.model_source import model_directory

    model = Path(model_directory(arguments.model, "MODEL")).resolve()
    positions = _positions(model)
    device = resolve_device(arguments.device)
    context = arguments.context or min(positions, CONTEXT[device])
    least = ENGINE.prompt_slack + 2
    if not least <= context <= positions:
        raise UserError(f"--context {context}: {model} has {positions} positions; give {least} to {positions}")
    config = ServerConfig(
        name=ENGINE.name,
        dtype=arguments.dtype or ("float32" if device == "cpu" else "auto"),
        tensor_model_parallel_size=arguments.tp,
        max_num_seqs=MAX_REQUESTS[device],
    )
    problems = list(ENGINE.served_model_violations(model, "--tp", arguments.tp))
    if problems:
        raise UserError("; ".join(problems))
    return Launch(
        str(model),
        config,
        device,
        # An answer whose request has no limit may fill the server's context.
        context - ENGINE.prompt_slack,
        host=arguments.host,
        port=arguments.port,
        trust_remote_code=arguments.trust_remote_code,
        openai_name=model.name,
    )


def _positions(model: Path) -> int:
    """The number of positions of a model.  Raises UserError for a directory that is no model."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model}: no model with a readable config.json ({error}); give a Hugging Face directory, as scalerl merge "
            "writes it from a checkpoint"
        ) from None
    config = config.get("text_config") or config
    return max_positions(config) if config.get("max_position_embeddings") else CONTEXT["cpu"]


def _unknown_line(model: str, trust_remote_code: bool) -> str | None:
    """What a user must know of the model's tokenizer; None if it has tokens for all that is usual."""
    from scalerl.data import load_tokenizer
    from scalerl.data.model_source import model_directory
    from scalerl.data.unknown_text import shown_pieces, unwritable_ascii

    unknown = unwritable_ascii(load_tokenizer(model_directory(model, "MODEL"), trust_remote_code))
    if not unknown:
        return None
    return (
        f"its tokenizer has no token for {len(unknown)} of 95 printable ASCII characters, which the model does not see "
        f"in a request: {shown_pieces(unknown)}"
    )


def _ready(url: str, model: Path, seconds: float) -> str:
    url_option = "" if url.endswith(f":{DEFAULT_PORT}") else f" --url {url}"
    return f"""\
{model} is served at {url}/v1 (after {seconds:.0f} s); Ctrl-C ends it
  scalerl chat{url_option} "question"
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model.resolve().name}", "messages": [{{"role": "user", "content": "question"}}]}}'"""
