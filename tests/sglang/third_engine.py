"""An engine that has nothing of SGLang's protocol: paths, bodies and answers are its own, and so are its weights.

Its model is a counter: the next token is the last one plus the weight `step`, modulo VOCAB. Run as a program this file
is its server. It is what `scalerl/rollout/servers/engines/NAME.py` is for an engine of scalerl's own.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from scalerl.rollout.servers.connection import is_authorized, take_key
from scalerl.rollout.servers.engines import Command, Engine, Launch
from scalerl.rollout.servers.engines.base import Call
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, RolloutError, ServerLostError, Slot

if TYPE_CHECKING:
    from scalerl.rollout.servers.buckets import Bucket

VOCAB = 50
READY = "/v3/ready"
TOKEN_S = 0.01
NUM_BLOCKS, BLOCK_TOKENS = 3, 16
REASONS = {"full": "length", "cut": "abort"}


class ThirdEngine(Engine):
    name = "third"
    ready_path = READY
    memory_tags: ClassVar = {"kv_cache": ("table",), "weights": ("counter",)}

    def command(self, launch: Launch) -> Command:
        return [sys.executable, str(Path(__file__).resolve()), "--port", str(launch.port)], {}

    def generate(self, request: GenerateRequest, slots: Sequence[Slot]) -> Call:
        prompts = [request.input_ids + slot.output_ids for slot in slots]
        return Call("/v3/complete", {"prompts": prompts, "most": [slot.room for slot in slots]})

    async def read_samples(
        self, chunks: AsyncIterable[bytes], slots: Sequence[Slot], *, server: str, who: str
    ) -> AsyncGenerator[GenerateOutput, None]:
        rest, num_samples = b"", 0
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in map(json.loads, lines):
                if "because" in line:
                    raise RolloutError(f"{server} refused {who}: {line['because']}")
                slot, num_samples = slots[line["which"]], num_samples + 1
                logprobs = [0.0] * len(line["ids"])
                yield slot.extended(line["ids"], logprobs, [(0, line["weights"])], REASONS[line["why"]])
        if num_samples < len(slots):
            raise ServerLostError(f"the answer to {who} ends early")

    def abort_all(self) -> Call:
        return Call("/v3/cut", {})

    def policy_version(self) -> Call:
        return Call("/v3/state", method="GET")

    def read_policy_version(self, answer: Any) -> int:
        return answer["weights"]

    def begin_weight_update(self) -> None:
        return None

    def update_weights(self, blobs: Sequence[str], *, policy_version: int | None, is_mapped: bool) -> Call:
        (blob,) = blobs
        return Call("/v3/put", {"tensors": blob})

    def set_policy_version(self, policy_version: int) -> Call:
        return Call("/v3/name", {"weights": policy_version})

    def checksums(self) -> Call:
        return Call("/v3/sums", method="GET")

    def read_checksums(self, answer: Any) -> list[dict[str, str]]:
        return [answer]

    def flush_cache(self, wait_s: float) -> Call:
        return Call("/v3/forget", {})

    def release(self, tags: Sequence[str], *, idle_wait_s: float) -> list[Call]:
        return [Call("/v3/sleep", {"parts": list(tags)})]

    def resume(self, tags: Sequence[str]) -> Call:
        return Call("/v3/wake", {"parts": list(tags)})

    def pause(self) -> Call:
        return Call("/v3/hold", {})

    def continue_generation(self) -> Call:
        return Call("/v3/go", {})

    def health(self) -> Call:
        return Call("/v3/state", method="GET")

    def cache_size(self) -> Call:
        return Call("/v3/room", method="GET")

    def read_cache_size(self, answer: Any) -> tuple[int, int]:
        return answer["blocks"] * BLOCK_TOKENS, BLOCK_TOKENS

    def read_failure(self, answer: Any) -> str | None:
        return answer.get("because")

    def read_error(self, text: str) -> str:
        return json.loads(text)["because"]

    def serialize(self, bucket: Bucket) -> str:
        named = {name: bytes(tensor.contiguous().numpy().tobytes()).hex() for name, tensor in bucket.named}
        return base64.b64encode(json.dumps(named).encode()).decode()


class Counter:
    """The model and what it runs."""

    def __init__(self) -> None:
        self.tensors = {"step": b"\x01"}
        self.version, self.num_cuts = 0, 0
        self.asleep: set[str] = set()
        self.going = threading.Event()
        self.going.set()

    def complete(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.going.wait()
        if self.asleep:
            yield {"because": f"asleep: {sorted(self.asleep)}"}
            return
        num_cuts = self.num_cuts
        # The last sample first: an answer is told by its number, not by its place.
        for which in reversed(range(len(body["prompts"]))):
            prompt, ids, version = body["prompts"][which], [], self.version
            while len(ids) < body["most"][which] and self.num_cuts == num_cuts:
                time.sleep(TOKEN_S)
                ids.append(((ids or prompt)[-1] + self.tensors["step"][0]) % VOCAB)
            why = "full" if len(ids) == body["most"][which] else "cut"
            yield {"which": which, "ids": ids, "why": why, "weights": version}

    def cut(self, body: dict[str, Any]) -> None:
        self.num_cuts += 1

    def hold(self, body: dict[str, Any]) -> None:
        self.going.clear()
        self.num_cuts += 1

    def go(self, body: dict[str, Any]) -> None:
        self.going.set()

    def put(self, body: dict[str, Any]) -> dict[str, Any] | None:
        named = json.loads(base64.b64decode(body["tensors"]))
        if unknown := sorted(set(named) - {"step", "spare"}):
            return {"because": f"no tensor {unknown}"}
        self.tensors |= {name: bytes.fromhex(text) for name, text in named.items()}
        return None

    def rename(self, body: dict[str, Any]) -> None:
        self.version = body["weights"]

    def sleep(self, body: dict[str, Any]) -> None:
        self.asleep |= set(body["parts"])

    def wake(self, body: dict[str, Any]) -> None:
        self.asleep -= set(body["parts"])


class Handler(BaseHTTPRequestHandler):
    counter: Counter
    key: str

    def do_GET(self) -> None:
        counter = self.counter
        sums = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in counter.tensors.items()}
        state, room = {"weights": counter.version}, {"blocks": NUM_BLOCKS}
        self._answer({READY: {}, "/v3/state": state, "/v3/sums": sums, "/v3/room": room}.get(self.path))

    def do_POST(self) -> None:
        body, counter = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.counter
        if self.path == "/v3/complete" and self._is_allowed():
            self.send_response(200)
            self.end_headers()
            for line in counter.complete(body):
                self.wfile.write(json.dumps(line).encode() + b"\n")
            return
        calls = {
            "/v3/cut": counter.cut, "/v3/hold": counter.hold, "/v3/go": counter.go, "/v3/put": counter.put,
            "/v3/name": counter.rename, "/v3/forget": lambda body: None, "/v3/sleep": counter.sleep,
            "/v3/wake": counter.wake,
        }  # fmt: skip
        call = calls.get(self.path)
        self._answer(None if call is None else call(body) or {})

    def _is_allowed(self) -> bool:
        return self.path == READY or is_authorized(self.headers.get("Authorization"), self.key)

    def _answer(self, answer: dict[str, Any] | None) -> None:
        refusal = f"no such path: {self.path}" if self._is_allowed() else "the key is wrong"
        is_refused = answer is None or not self._is_allowed()
        data = json.dumps({"because": refusal} if is_refused else answer).encode()
        self.send_response(422 if is_refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    Handler.key, Handler.counter = take_key(), Counter()
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()
