"""`RolloutClient`: generation (async) and weight updates (sync) on one rollout server, SGLang or embedded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson

from scalerl.servers.access import authorization
from scalerl.servers.engines import ENGINES
from scalerl.servers.engines.base import FLATTENED
from scalerl.servers.purpose import POLICY, Purpose
from scalerl.servers.requests import (
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SamplingParams,
    ServerLostError,
    check_request,
)
from scalerl.servers.wire import Slot, output_of, read_events, slots_of

__all__ = ["GenerateOutput", "GenerateRequest", "RolloutClient", "RolloutError", "SamplingParams"]

MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
# Within this time an engine without requests becomes idle.
IDLE_WAIT_S = 30.0
# Within this time, or a request's own limit if less, a server that is well answers a health check, however busy it is.
HEALTH_TIMEOUT_S = 60.0
HEALTH_POLL_S = 0.2
JSON = {"Content-Type": "application/json"}


class RolloutClient:
    """Asks one rollout server for samples, and updates its weights; every error names the server.

    engine: the name of the server's engine (`engines.ENGINES`).
    key: the server's key (`RolloutServer.key`).
    max_concurrency: samples in flight at a time.
    max_model_len: tokens of prompt + response; max_new_tokens is cut to fit.
    purpose: for errors.
    timeout_s: for one request, its time in the server's queue included.
    """

    def __init__(
        self,
        url: str,
        engine: str,
        *,
        key: str,
        max_model_len: int,
        timeout_s: float = 600.0,
        max_concurrency: int = 256,
        purpose: Purpose = POLICY,
    ) -> None:
        self.url = url.rstrip("/")
        self.engine = ENGINES[engine]
        self.key = key
        self.max_model_len = max_model_len
        self.timeout_s, self.purpose = timeout_s, purpose
        self.max_concurrency = max_concurrency
        self._http: aiohttp.ClientSession | None = None
        self._num_users = 0
        self._has_session: bool | None = None
        self._released: set[str] = set()
        self._paused = False

    # --- generation ---

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keeps connections open across several calls of one event loop; calls that overlap share them."""
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=authorization(self.key))
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                http, self._http = self._http, None
                await http.close()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[GenerateOutput]:
        """Yields all samples of all requests, each as soon as it is finished.

        Raises ValueError for a request that cannot be sent and RolloutError for one that the server did not serve; the
        rest is given up then.
        """
        for request in requests:
            check_request(request, self.max_model_len)
        largest = max((request.n for request in requests), default=1)
        in_flight = asyncio.Semaphore(max(1, self.max_concurrency // largest))
        # Samples, errors of requests, and a None for each request that has ended.
        results: asyncio.Queue[GenerateOutput | Exception | None] = asyncio.Queue()

        async def bounded(request: GenerateRequest) -> None:
            try:
                async with in_flight, contextlib.aclosing(self._generate_one(request)) as outputs:
                    async for output in outputs:
                        results.put_nowait(output)
            except Exception as error:
                results.put_nowait(error)
            else:
                results.put_nowait(None)

        async with self.connected():
            tasks = [asyncio.ensure_future(bounded(request)) for request in requests]
            num_running = len(tasks)
            try:
                while num_running:
                    item = await results.get()
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        num_running -= 1
                    else:
                        yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def abort_all(self) -> None:
        """Ends everything that the server runs, whoever asked for it; what it has so far comes back as aborted.

        A request that is on its way to the scheduler slips through: repeat until all have come back.
        """
        async with self.connected():
            await self._call("POST", "/abort_request", {"abort_all": True}, "abort")

    async def _generate_one(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Asks by one HTTP request for the samples that have room, and yields each as soon as it is finished; the
        others are as long as they may be."""
        who = f"request {request.request_id!r}"
        slots = slots_of(request, self.max_model_len)
        for output in await self._full([slot for slot in slots if slot.room <= 0]):
            yield output
        asked = [slot for slot in slots if slot.room > 0]
        if not asked:
            return
        missing = dict(enumerate(asked))
        body = self.engine.generate_body(request, asked)
        async with contextlib.aclosing(self._events("/generate", body, who)) as events:
            async for event in events:
                if event["meta_info"]["finish_reason"] is None:  # SGLang sends the first token too
                    continue
                # The only sample of a request has no index.
                slot = missing.pop(event.get("index", 0), None)
                if slot is None:
                    raise RolloutError(f"{self.url}/generate gave a sample of {who} twice, or one not asked for")
                yield output_of(slot, event, undone_by_abort=self.engine.undone_by_abort)
        if missing:
            raise RolloutError(
                f"{self.url}/generate gave {len(asked) - len(missing)} samples for {who}, asked for {len(asked)}"
            )

    async def _full(self, slots: Sequence[Slot]) -> list[GenerateOutput]:
        if not slots:
            return []
        info = json.loads(await self._call("GET", "/model_info", None, "its policy version"))
        version = int(info["weight_version"])
        return [slot.extended([], [], [(0, version)], "length") for slot in slots]

    async def _events(self, path: str, body: dict[str, Any], who: str) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each event of the answer's stream; errors as `_call`."""
        async with self._answer("POST", path, body, who) as response:
            async for event in read_events(response.content.iter_any(), who):
                if "error" in event:
                    raise RolloutError(f"{self.url}{path} refused {who}: {_message(json.dumps(event))}")
                yield event

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, who: str) -> str:
        """The text of the server's answer; raises RolloutError, naming the server and `who`, unless it is a success."""
        async with self._answer(method, path, body, who) as response:
            return await response.text()

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, who: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._http is not None
        try:
            data = None if body is None else orjson.dumps(body)
            async with self._http.request(method, self.url + path, data=data, headers=JSON) as response:
                if response.status != 200:
                    raise RolloutError(f"{self.url}{path} refused {who}: {_message(await response.text())}")
                yield response
        except TimeoutError as error:
            raise RolloutError(
                f"{self.url}{path} did not answer {who} in {self.timeout_s:.0f} s; see the server's log, or raise "
                f"{self.purpose.key('request_timeout_s')}"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerLostError(f"{self.url} went away during {who}: {error!r}; see the server's log") from error

    # --- weights ---

    def begin_weight_update(self) -> None:
        """Opens the session in which a server takes new weights; waits for running requests.

        SGLang before 0.5.21 has no sessions; there this does nothing.
        """
        self._has_session = self._post("/begin_weight_update", {}, missing_ok=True) is not None

    def update_weights(
        self,
        blobs: Sequence[str],
        *,
        flush_cache: bool,
        policy_version: int | None = None,
        load_format: str = FLATTENED,
    ) -> None:
        """Has the server load one bucket of weights.

        blobs: `serialize_bucket` once per engine rank.  flush_cache: on the last bucket.
        load_format: how SGLang reads them (`Bucket.load_format`).
        """
        body: dict[str, Any] = {"serialized_named_tensors": list(blobs), "flush_cache": flush_cache}
        body |= self.engine.update_fields(load_format)
        if policy_version is not None:
            body["weight_version"] = str(policy_version)
        self._post("/update_weights_from_tensor", body)

    def join_update_group(
        self, address: str, port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Has the server's ranks join a trainer rank's group, by the store at that address; returns when all are in.

        rank_offset: rank in the group of the server's first rank.
        """
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        self._post("/init_weights_update_group", body | {"group_name": group_name, "backend": backend})

    def update_weights_from_group(
        self,
        layout: Sequence[tuple[str, str, Sequence[int]]],
        *,
        group_name: str,
        flush_cache: bool,
        policy_version: int | None = None,
    ) -> None:
        """Has the server receive one bucket, which `update_group.broadcast` sends meanwhile.

        layout: (name, dtype, shape), as packed.
        """
        names, dtypes, shapes = (list(column) for column in zip(*layout, strict=True))
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": [list(shape) for shape in shapes]}
        body |= {"group_name": group_name, "flush_cache": flush_cache, "load_format": FLATTENED}
        if policy_version is not None:
            body["weight_version"] = str(policy_version)
        self._post("/update_weights_from_distributed", body)

    def update_weights_from_disk(self, directory: str, *, policy_version: int) -> None:
        """Has the server load a whole model from files, without a session; waits for running requests.

        directory: as the server sees it.
        """
        body = {"model_path": directory, "load_format": "safetensors", "weight_version": str(policy_version)}
        self._post("/update_weights_from_disk", body | {"flush_cache": True})

    def end_weight_update(self, policy_version: int) -> None:
        """Closes the session of a weight update; samples from now on carry `policy_version`."""
        if self._has_session:
            self._post("/end_weight_update", {})
        self._has_session = None
        self.set_policy_version(policy_version)

    def set_policy_version(self, policy_version: int) -> None:
        """Tells the server which version its weights are; no request may be running."""
        self._post("/update_weight_version", {"new_version": str(policy_version), "abort_all_requests": False})

    def checksums(self) -> list[dict[str, str]]:
        """The checksums of each engine rank, by the server's parameter names (see `weights.expected_checksums`)."""
        answer = self._post("/weights_checker", {"action": "checksum"})
        if not answer.get("ranks"):
            raise RolloutError(f"{self.url}/weights_checker answered no ranks: {answer}")
        ranks = answer["ranks"]
        return [rank["checksums"] for rank in sorted(ranks, key=_tp_rank)]

    def flush_cache(self, wait_s: float = 0.0) -> None:
        """Has the server forget cached prefixes. wait_s: how long the engine may take to be idle; else RolloutError."""
        self._post(f"/flush_cache?timeout={wait_s:g}" if wait_s else "/flush_cache", {})

    # --- state ---

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Has the server, which may run no request, give device memory back.

        tags: of kv_cache, weights, cuda_graph; None: all.
        """
        if tags is None or "kv_cache" in tags:
            # With its overlapped schedule SGLang is busy for one more iteration after the last sample has come, and a
            # release would end it then.
            self.flush_cache(min(IDLE_WAIT_S, self.timeout_s / 2))
        self._post("/release_memory_occupation", {} if tags is None else {"tags": list(tags)})
        self._released |= set(MEMORY_TAGS if tags is None else tags)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Has the server take back the memory that `release` freed. Weights come back undefined and must be updated.

        Raises ValueError for a tag that this client did not release: SGLang's scheduler would die of it.
        """
        wanted = set(MEMORY_TAGS if tags is None else tags)
        if not wanted <= self._released:
            raise ValueError(f"resume {sorted(wanted)}: {sorted(wanted - self._released)} is not released")
        self._post("/resume_memory_occupation", {} if tags is None else {"tags": list(tags)})
        self._released -= wanted

    def pause(self) -> None:
        """Ends running requests with what they have (finish reason abort); new ones wait for `continue_generation`."""
        self._paused = True
        self._post("/pause_generation", {"mode": "abort"})

    def continue_generation(self) -> None:
        self._post("/continue_generation", {})
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether this client paused the server."""
        return self._paused

    @property
    def released(self) -> frozenset[str]:
        """The tags that this client released."""
        return frozenset(self._released)

    async def is_well(self) -> bool:
        """Whether the engine behind the server does its work, within HEALTH_TIMEOUT_S.

        Its scheduler, which is what makes tokens, answers a question about its state; a token itself would not come
        from an engine that somebody paused or released.
        """
        url, deadline = f"{self.url}/server_info", time.monotonic() + min(HEALTH_TIMEOUT_S, self.timeout_s)
        async with aiohttp.ClientSession(headers=authorization(self.key)) as http:
            while (left_s := deadline - time.monotonic()) > 0:
                try:
                    async with http.get(url, timeout=aiohttp.ClientTimeout(total=left_s)) as response:
                        if response.status == 200:
                            return True
                except aiohttp.ClientConnectorError:  # nobody listens
                    return False
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(HEALTH_POLL_S)
        return False

    def healthy(self) -> bool:
        try:
            self._request("GET", "/health", None)
        except RolloutError:
            return False
        return True

    def server_info(self) -> dict[str, Any]:
        """The server's description of itself: version, tp_size, model_path and its resolved arguments."""
        info = self._request("GET", "/server_info", None)
        assert info is not None
        return info

    def _post(self, path: str, body: dict[str, Any], missing_ok: bool = False) -> Any:
        return self._request("POST", path, body, missing_ok)

    def _request(self, method: str, path: str, body: dict[str, Any] | None, missing_ok: bool = False) -> Any:
        """The answer's JSON ({} when it has none); None for a 404 with missing_ok. RolloutError unless a success."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers=JSON | authorization(self.key),
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing_ok:
                return None
            raise RolloutError(
                f"{self.url}{path} refused (HTTP {error.code}): {_message(error.read().decode())}"
            ) from error
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise RolloutError(f"{self.url}{path} got no answer: {error}; see the server's log") from error
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:  # /flush_cache answers in prose
            return {}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(f"{self.url}{path} failed: {answer.get('message')}")
        return {} if answer is None else answer


def _tp_rank(rank: dict[str, Any]) -> int:
    placement = rank.get("parallelism_info") or [{"tp_rank": 0}]
    return (placement[0] if isinstance(placement, list) else placement)["tp_rank"]


def _message(text: str) -> str:
    """The message of an error answer, in any of the shapes that servers use."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
    if isinstance(answer, dict):
        nested = answer.get("error")
        for message in (answer.get("message"), nested.get("message") if isinstance(nested, dict) else nested):
            if message:
                return str(message)
    return text.strip()
