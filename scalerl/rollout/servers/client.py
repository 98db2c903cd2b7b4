"""`RolloutClient`: generation (async) and weight updates (sync) on one rollout server, in its engine's protocol.

`Replica` is the address of a server, and `ClientSettings` make the clients of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from scalerl.config.schema import RolloutConfig
from scalerl.rollout.servers.connection import ask, authorization, watched_socket
from scalerl.rollout.servers.engines import ENGINES
from scalerl.rollout.servers.engines.base import Call
from scalerl.rollout.servers.purpose import POLICY, Purpose
from scalerl.rollout.servers.requests import (
    VERSION_MARK,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SamplingParams,
    ServerLostError,
    Slot,
    check_request,
    slots_of,
)

if TYPE_CHECKING:
    import torch

    from scalerl.rollout.servers.checksums import ExpectedChecksums

__all__ = [
    "ClientSettings",
    "GenerateOutput",
    "GenerateRequest",
    "Replica",
    "RolloutClient",
    "RolloutError",
    "SamplingParams",
]

# Within this time an engine without requests becomes idle.
IDLE_WAIT_S = 30.0
# Within this time, or a request's own limit if less, a server that is well answers a health check, however busy it is.
HEALTH_TIMEOUT_S = 60.0
HEALTH_POLL_S = 0.2
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Replica:
    """The address of a rollout server.  engine: name of its engine (`engines.ENGINES`).

    tp_size: its ranks, each of which takes a copy of each bucket.  key: the key that its clients must have.
    engine_kwargs: of its configuration.  quantization: of the weights that its server takes (`rollout.quantization`).
    adapter: of its clients' requests, as `GenerateRequest.adapter`.
    """

    url: str
    engine: str
    tp_size: int
    key: str = field(repr=False)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    quantization: str | None = None
    adapter: str | None = None

    def expected_checksums(
        self,
        model_config: Mapping[str, Any],
        dtype: torch.dtype | None = None,
        ranks: Collection[int] | None = None,
    ) -> ExpectedChecksums:
        """What its server's checksums must be.  model_config: the model's config.json.  dtype, ranks: as
        `ExpectedChecksums`."""
        from scalerl.rollout.servers.checksums import ExpectedChecksums

        placement = ENGINES[self.engine].placement(model_config, self.tp_size, self.engine_kwargs)
        return ExpectedChecksums(placement, dtype, ranks)


class RolloutClient:
    """Asks one rollout server for samples, and updates its weights; every error names the server.

    engine: the name of the server's engine (`engines.ENGINES`).
    key: the server's key (`RolloutServer.key`).
    max_concurrency: samples in flight at a time; the default, as that of timeout_s, is for direct use: a run's clients
        are made by `ClientSettings`, with what its configuration says.
    max_model_len: tokens of prompt + response; max_new_tokens is cut to fit.
    purpose: for errors.  adapter: of its requests, as `GenerateRequest.adapter`.
    timeout_s: for one request, its time in the server's queue included.
    """

    def __init__(
        self,
        url: str,
        engine: str,
        *,
        key: str,
        max_model_len: int,
        timeout_s: float = RolloutConfig.request_timeout_s,
        max_concurrency: int = RolloutConfig.max_num_seqs,
        purpose: Purpose = POLICY,
        adapter: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.engine, self.adapter = ENGINES[engine], adapter
        self.key = key
        self.max_model_len = max_model_len
        self.timeout_s, self.purpose = timeout_s, purpose
        self.max_concurrency = max_concurrency
        self._http: aiohttp.ClientSession | None = None
        self._num_users = 0
        self._has_session: bool | None = None
        self._paused = False

    # --- generation ---

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keeps connections open across several calls of one event loop; calls that overlap share them."""
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            connector = aiohttp.TCPConnector(limit=0, socket_factory=watched_socket)
            self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=authorization(self.key))
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0:
                http, self._http = self._http, None
                await http.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Asks for all samples of a request, and yields each as soon as it is finished.

        Raises ValueError for a request that cannot be sent and RolloutError when the server does not serve it whole;
        the rest is given up then.
        """
        check_request(request, self.max_model_len)
        if self.adapter is not None:
            request = replace(request, adapter=self.adapter)
        who = f"request {request.request_id!r}"
        slots = slots_of(request, self.max_model_len)
        async with self.connected():
            for output in await self._full([slot for slot in slots if slot.room <= 0]):
                yield output
            asked = [slot for slot in slots if slot.room > 0]
            if not asked:
                return
            call = self.engine.generate(request, asked)
            where = self.url + call.path
            missing = {slot.key for slot in asked}
            async with self._answer(call, who) as response:
                chunks = response.content.iter_any()
                samples = self.engine.read_samples(chunks, asked, server=where, who=who)
                async with contextlib.aclosing(samples):
                    async for output in samples:
                        if output.key not in missing:
                            raise RolloutError(f"{where} gave a sample of {who} twice, or one not asked for")
                        missing.remove(output.key)
                        yield output
            if missing:
                raise RolloutError(
                    f"{where} gave {len(asked) - len(missing)} samples for {who}, asked for {len(asked)}"
                )

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Separates the thoughts of an answer from the rest by a parser of SGLang: (thoughts, rest)."""
        async with self.connected():
            answer = json.loads(await self._call(self.engine.separate_reasoning(text, parser), f"parser {parser}"))
        return answer["reasoning_text"] or "", answer["text"] or ""

    async def parse_tool_calls(
        self, text: str, parser: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[dict[str, str]]]:
        """Parses the tool calls of an answer by a parser of SGLang: (text without them, name and arguments of each).

        tools: their schemas, as OpenAI's API has them.
        """
        async with self.connected():
            call = self.engine.parse_tool_calls(text, parser, tools)
            answer = json.loads(await self._call(call, f"parser {parser}"))
        calls = [{"name": call["name"], "arguments": call["parameters"]} for call in answer["calls"]]
        return answer["normal_text"] or "", calls

    async def abort_all(self) -> None:
        """Ends everything that the server runs, whoever asked for it; what it has so far comes back as aborted.

        A request that is on its way to the scheduler slips through: repeat until all have come back.
        """
        async with self.connected():
            await self._call(self.engine.abort_all(), "abort")

    async def _full(self, slots: Sequence[Slot]) -> list[GenerateOutput]:
        if not slots:
            return []
        answer = json.loads(await self._call(self.engine.policy_version(), "its policy version"))
        version = self.engine.read_policy_version(answer)
        return [slot.extended([], [], [(0, version)], "length") for slot in slots]

    async def _call(self, call: Call, who: str) -> str:
        """The text of the server's answer; raises RolloutError, naming the server and `who`, unless it is a success."""
        async with self._answer(call, who) as response:
            return await response.text()

    @contextlib.asynccontextmanager
    async def _answer(self, call: Call, who: str) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._http is not None
        where = self.url + call.path
        try:
            data = None if call.body is None else orjson.dumps(call.body)
            async with self._http.request(call.method, where, data=data, headers=JSON) as response:
                if response.status != 200:
                    raise RolloutError(f"{where} refused {who}: {self.engine.read_error(await response.text())}")
                yield response
        except TimeoutError as error:
            raise RolloutError(
                f"{where} did not answer {who} in {self.timeout_s:.0f} s; see the server's log, or raise "
                f"{self.purpose.key('request_timeout_s')}"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerLostError(f"{self.url} went away during {who}: {error!r}; see the server's log") from error

    # --- weights ---

    def begin_weight_update(self) -> None:
        """Opens the session in which a server takes new weights; waits for running requests.

        Does nothing on a server without sessions.
        """
        call = self.engine.begin_weight_update()
        self._has_session = call is not None and self.ask(call) is not None

    def update_weights(
        self,
        blobs: Sequence[str],
        *,
        policy_version: int | None = None,
        is_mapped: bool = False,
    ) -> None:
        """Has the server load one bucket of weights.

        blobs: `Engine.serialize` once per engine rank.
        is_mapped: `Bucket.is_mapped`.
        """
        self.ask(self.engine.update_weights(blobs, policy_version=policy_version, is_mapped=is_mapped))

    def update_weights_from_disk(self, directory: str, *, policy_version: int) -> None:
        """Has the server load a whole model from files, without a session; waits for running requests.

        directory: as the server sees it.
        """
        self.ask(self.engine.update_weights_from_disk(directory, policy_version=policy_version))

    def load_adapter(self, name: str, policy_version: int, config: Mapping[str, Any], blobs: Sequence[str]) -> None:
        """Has the server load a version of an adapter, which requests that begin from now on have.

        config: of its adapter_config.json.  blobs: `Engine.serialize` once per engine rank.
        It forgets all other versions but the newest so far: no request can have one of these any more.
        """
        version = f"{name}{VERSION_MARK}{policy_version}"
        held = [other for other in self.adapters() if other.rpartition(VERSION_MARK)[0] == name]
        for other in held:
            if other == version or other != held[-1]:
                self.ask(self.engine.unload_adapter(other))
        self.ask(self.engine.load_adapter(version, config, blobs))

    def adapters(self) -> list[str]:
        """The versions of adapters that the server has, the newest last."""
        return self.engine.read_adapters(self.ask(self.engine.adapters()))

    def end_weight_update(self, policy_version: int) -> None:
        """Closes the session of a weight update; samples from now on carry `policy_version`."""
        if self._has_session:
            self.ask(self.engine.end_weight_update())
        self._has_session = None
        self.set_policy_version(policy_version)

    def set_policy_version(self, policy_version: int) -> None:
        """Tells the server which version its weights are; no request may be running."""
        self.ask(self.engine.set_policy_version(policy_version))

    def checksums(self) -> list[dict[str, str]]:
        """The checksums of each engine rank, by the server's parameter names (see `weights.expected_checksums`)."""
        call = self.engine.checksums()
        answer = self.ask(call)
        ranks = self.engine.read_checksums(answer)
        if not ranks:
            raise RolloutError(f"{self.url}{call.path} answered no ranks: {answer}")
        return ranks

    def flush_cache(self, wait_s: float = 0.0) -> None:
        """Has the server forget cached prefixes. wait_s: how long the engine may take to be idle; else RolloutError."""
        self.ask(self.engine.flush_cache(wait_s))

    # --- state ---

    def release(self, tags: Sequence[str]) -> None:
        """Has the server, which may run no request, give device memory back.  tags: of the engine's (`memory_tags`)."""
        for call in self.engine.release(tags, idle_wait_s=min(IDLE_WAIT_S, self.timeout_s / 2)):
            self.ask(call)

    def resume(self, tags: Sequence[str]) -> None:
        """Has the server take back the memory that `release` freed. Weights come back undefined and must be updated.

        An engine may die of tags that are not released: `SyncOrder` keeps the order of a run.
        """
        self.ask(self.engine.resume(tags))

    def pause(self) -> None:
        """Ends running requests with what they have (finish reason abort); new ones wait for `continue_generation`."""
        self._paused = True
        self.ask(self.engine.pause())

    def continue_generation(self) -> None:
        self.ask(self.engine.continue_generation())
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether this client paused the server."""
        return self._paused

    async def is_well(self) -> bool:
        """Whether the engine behind the server does its work, within HEALTH_TIMEOUT_S.

        Its scheduler, which is what makes tokens, answers a question about its state; a token itself would not come
        from an engine that somebody paused or released.
        """
        call, deadline = self.engine.health(), time.monotonic() + min(HEALTH_TIMEOUT_S, self.timeout_s)
        async with aiohttp.ClientSession(headers=authorization(self.key)) as http:
            while (left_s := deadline - time.monotonic()) > 0:
                try:
                    async with http.request(
                        call.method, self.url + call.path, json=call.body, timeout=aiohttp.ClientTimeout(total=left_s)
                    ) as response:
                        if response.status == 200:
                            return True
                except aiohttp.ClientConnectorError:  # nobody listens
                    return False
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(HEALTH_POLL_S)
        return False

    def cache_size(self) -> tuple[int, int] | None:
        """The tokens of the server's KV cache, and of a page; None for an engine, or a server, without such numbers."""
        call = self.engine.cache_size()
        return None if call is None else self.engine.read_cache_size(self.ask(call))

    def ask(self, call: Call) -> Any:
        """Makes a call of `engine`. Returns the answer's JSON ({} when it has none); None for an optional call that the
        server does not have.

        Raises RolloutError unless the answer is a success.
        """
        where = self.url + call.path
        body = None if call.body is None else json.dumps(call.body).encode()
        try:
            status, text = ask(
                where, call.method, body, headers=JSON | authorization(self.key), timeout_s=self.timeout_s
            )
        except (http.client.HTTPException, OSError) as error:
            raise RolloutError(f"{where} got no answer: {error}; see the server's log") from error
        if status == 404 and call.is_optional:
            return None
        if status != 200:
            raise RolloutError(f"{where} refused (HTTP {status}): {self.engine.read_error(text)}")
        try:
            answer = json.loads(text) if text else {}
        except json.JSONDecodeError:  # SGLang answers a flush in prose
            return {}
        if (failure := self.engine.read_failure(answer)) is not None:
            raise RolloutError(f"{where} failed: {failure}")
        return {} if answer is None else answer


@dataclass(frozen=True)
class ClientSettings:
    """The settings of all clients of a set of servers, in any process.

    timeout_s, max_concurrency (samples in flight): from the configuration, so that neither has a default here.
    """

    purpose: Purpose
    max_model_len: int
    timeout_s: float
    max_concurrency: int

    def client(self, replica: Replica) -> RolloutClient:
        return RolloutClient(
            replica.url,
            replica.engine,
            key=replica.key,
            max_model_len=self.max_model_len,
            timeout_s=self.timeout_s,
            max_concurrency=self.max_concurrency,
            purpose=self.purpose,
            adapter=replica.adapter,
        )
