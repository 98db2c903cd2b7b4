"""The program `python -m scalerl.rollout.servers.embedded.server`: the embedded engine with SGLang's HTTP endpoints."""

from __future__ import annotations

import argparse
import base64
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import safetensors.torch
import torch

from scalerl.base.lean_imports import lean_imports
from scalerl.rollout.servers.buckets import read_cuda, read_mapped
from scalerl.rollout.servers.connection import OPEN_PATH, is_authorized, take_key
from scalerl.rollout.servers.process import address_family
from scalerl.rollout.servers.requests import DATA, EVENT_END, FLATTENED, LAST_EVENT
from scalerl.rollout.servers.update_group import (
    broadcast,
    join_group,
    num_bytes,
    reach_store,
    unpack_bytes,
)

with lean_imports(compiler=False):
    from scalerl.rollout.servers.embedded.engine import DecodingEngine, RefusedError
from scalerl.rollout.servers.embedded.parsers import parse_tool_calls, separate_reasoning

SAMPLING_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "ignore_eos": False,
    "stop": [],
    "stop_token_ids": [],
    "sampling_seed": 0,
    # Index, in the response, of the first token to draw.
    "sampling_position": 0,
}
# Seconds to join a group, and for one broadcast; torch's default.
GROUP_TIMEOUT_S = 1800.0
SUCCESS = {"success": True, "message": "Success"}


class Endpoints:
    """The endpoints by path, functions of the request's JSON.

    They raise RefusedError for status 400; /generate returns an iterator, which is sent as a stream of events.
    """

    def __init__(self, engine: DecodingEngine) -> None:
        self._engine = engine
        self._groups: dict[str, Any] = {}
        self.get: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/health": lambda body: {},
            "/model_info": lambda body: engine.info(),
            "/server_info": lambda body: engine.check_alive() or engine.info() | {"version": "embedded", "tp_size": 1},
        }
        self.post: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/generate": self._generate,
            "/begin_weight_update": lambda body: engine.begin_weight_update() or SUCCESS,
            "/update_weights_from_tensor": self._update_weights,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._update_from_group,
            "/update_weights_from_disk": self._update_from_disk,
            "/end_weight_update": lambda body: engine.end_weight_update() or SUCCESS,
            "/update_weight_version": lambda body: engine.set_policy_version(str(body["new_version"])) or SUCCESS,
            "/weights_checker": self._weights_checker,
            # Nothing is cached between requests.
            "/flush_cache": lambda body: SUCCESS,
            "/separate_reasoning": separate_reasoning,
            "/parse_function_call": parse_tool_calls,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": lambda body: engine.resume_generation() or SUCCESS,
            "/release_memory_occupation": lambda body: engine.release(body.get("tags")),
            "/resume_memory_occupation": lambda body: engine.resume(body.get("tags")),
        }

    def _generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompts, sampling_params = body["input_ids"], body["sampling_params"]
        if len(prompts) != len(sampling_params):
            raise RefusedError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts")
        unknown = sorted({key for params in sampling_params for key in params} - SAMPLING_DEFAULTS.keys())
        if unknown:
            raise RefusedError(f"sampling_params {unknown} are not known; known: {sorted(SAMPLING_DEFAULTS)}")
        answers = self._engine.generate(prompts, [SAMPLING_DEFAULTS | params for params in sampling_params])
        return (answer | {"index": index} for index, answer in answers)

    def _update_weights(self, body: dict[str, Any]) -> Any:
        blobs = body["serialized_named_tensors"]
        if len(blobs) != 1:
            raise RefusedError(f"{len(blobs)} buckets for the 1 rank of the embedded engine")
        self._engine.require_session("update_weights_from_tensor")
        self._engine.load(_opened(blobs[0], self._engine.device), body.get("weight_version"))
        return SUCCESS

    def _join_group(self, body: dict[str, Any]) -> Any:
        name, address, port = body["group_name"], body["master_address"], body["master_port"]
        self._groups[name] = join_group(
            reach_store(address, port, GROUP_TIMEOUT_S),
            name=name,
            rank=body["rank_offset"],
            world_size=body["world_size"],
            backend=body["backend"],
            timeout_s=GROUP_TIMEOUT_S,
        )
        return SUCCESS

    def _update_from_group(self, body: dict[str, Any]) -> Any:
        if body.get("load_format") != FLATTENED:
            raise RefusedError(f"load_format {body.get('load_format')!r} is not known; known: {FLATTENED}")
        self._engine.require_session("update_weights_from_distributed")
        layout = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        flat = torch.empty(num_bytes(layout), dtype=torch.uint8, device=self._engine.device)
        broadcast(flat, self._known_group(body))
        self._engine.load(dict(unpack_bytes(flat, layout)), body.get("weight_version"))
        return SUCCESS

    def _update_from_disk(self, body: dict[str, Any]) -> Any:
        self._engine.load_directory(body["model_path"], body.get("weight_version"))
        return SUCCESS

    def _known_group(self, body: dict[str, Any]) -> Any:
        if body["group_name"] not in self._groups:
            raise RefusedError(f"no group {body['group_name']!r}; call init_weights_update_group first")
        return self._groups[body["group_name"]]

    def _weights_checker(self, body: dict[str, Any]) -> Any:
        if body.get("action") != "checksum":
            raise RefusedError(f"action {body.get('action')!r} is not known; known: checksum")
        return SUCCESS | {"ranks": [{"checksums": self._engine.checksums()}]}

    def _abort(self, body: dict[str, Any]) -> Any:
        if body.get("abort_all") is not True:
            raise RefusedError("the embedded engine aborts all requests or none; set abort_all")
        self._engine.abort_all()
        return SUCCESS

    def _pause(self, body: dict[str, Any]) -> Any:
        if body.get("mode", "abort") != "abort":
            raise RefusedError(f"pause mode {body['mode']!r}: the embedded engine knows abort only")
        self._engine.pause()
        return SUCCESS


def _opened(blob: str, device: torch.device) -> Mapping[str, torch.Tensor]:
    """The tensors of a bucket, given by `EmbeddedEngine.serialize`."""
    if not blob.startswith("{"):
        return safetensors.torch.load(base64.b64decode(blob, validate=True))
    handle = json.loads(blob)
    return dict(read_cuda(handle, device) if "gpu" in handle else read_mapped(handle))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open
    endpoints: Endpoints
    key: str

    def do_GET(self) -> None:
        self._respond(self.endpoints.get)

    def do_POST(self) -> None:
        self._respond(self.endpoints.post)

    def _respond(self, operations: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path != OPEN_PATH and not is_authorized(self.headers.get("Authorization"), self.key):
            self._send(401, {"error": "Unauthorized"})
            return
        operation = operations.get(path)
        if operation is None:
            self._send(404, {"detail": "Not Found"})
            return
        try:
            answer = operation(orjson.loads(raw) if raw else {})
            if isinstance(answer, Iterator):
                self._send_events(answer)
            else:
                self._send(200, answer)
        except (RefusedError, KeyError, json.JSONDecodeError) as error:
            message = f"missing field {error}" if isinstance(error, KeyError) else str(error)
            self._send(400, {"success": False, "message": message, "error": {"message": message}})
        except BrokenPipeError:  # the client left
            pass
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            self._send(500, {"success": False, "message": message, "error": {"message": message}})

    def _send(self, status: int, body: Any) -> None:
        data = orjson.dumps(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_events(self, events: Iterator[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                self._send_chunk(DATA + orjson.dumps(event) + EVENT_END)
        except RuntimeError as error:  # the engine failed; it is too late for another status
            traceback.print_exc()
            self._send_chunk(DATA + orjson.dumps({"error": {"message": str(error)}}) + EVENT_END)
        self._send_chunk(DATA + LAST_EVENT + EVENT_END)
        self._send_chunk(b"")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line per request would hide the lines that matter


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # Connections that may wait to be accepted; a client opens one per request.
    request_queue_size = 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scalerl.rollout.servers.embedded.server", description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-model-len", type=int, required=True, help="tokens of prompt + response")
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    Handler.key = take_key()
    # With one thread sums are added in the same order on every machine.
    torch.set_num_threads(1)
    Server.address_family = address_family(args.host)
    # The port is taken before the model is loaded; requests wait until serve_forever.
    with Server((args.host, args.port), Handler) as server:
        engine = DecodingEngine(
            args.model_path,
            dtype=getattr(torch, args.dtype),
            device=args.device,
            max_model_len=args.max_model_len,
            max_batch_size=args.max_batch_size,
            trust_remote_code=args.trust_remote_code,
        )
        Handler.endpoints = Endpoints(engine)
        server.serve_forever()


if __name__ == "__main__":
    main()
