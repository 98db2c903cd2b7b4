"""`Dispatcher`: spreads requests over several rollout servers, and takes more while others run.

`ServerChooser` chooses the server of a request: the least loaded one, or the one that has the prompt already.
`generate_samples` sends requests that are all known at the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import (
    ABORTED,
    NO_VERSION,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SampleKey,
    ServerLostError,
    check_request,
    unfinished_requests,
)

if TYPE_CHECKING:
    from scalerl.rollout.servers.recovery import Replacements

T = TypeVar("T")

# How often `stop_when` is asked while no output arrives, and an abort is repeated until all outputs have.
STOP_POLL_S = 0.05
# Aborts in a row that leave a sample without a new token, before the request is given up.
MAX_FRUITLESS_ABORTS = 16
# Connections that a server which is well may cut, per request.
MAX_CUT_CONNECTIONS = 3


def max_in_flight(max_num_seqs: int) -> int:
    """The most samples to send to a server that computes max_num_seqs at a time.

    A fifth of them waits there, so that a place that becomes free is taken in the same step. More would leave other
    servers without work at the end (benchmarks/rollout_client.py).
    """
    return max_num_seqs + max_num_seqs // 4


@dataclass
class _Server:
    max_samples: int
    num_samples: int = 0
    num_tokens: int = 0
    alive: bool = True

    def fits(self, num_samples: int) -> bool:
        # A request with more samples than a server runs at a time goes alone.
        return self.alive and (self.num_samples == 0 or self.num_samples + num_samples <= self.max_samples)


@dataclass
class ServerChooser:
    """Chooses servers by load: tokens still owed, then samples; where both tie, the server with the lowest index.

    max_samples: per server, samples in flight at a time.
    """

    max_samples: Sequence[int]
    servers: list[_Server] = field(init=False)
    _homes: dict[Hashable, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.servers = [_Server(limit) for limit in self.max_samples]

    def assign(self, prompt: Hashable, num_samples: int, num_tokens: int) -> int | None:
        """Returns the index of a server, which now owes these samples and tokens; None when no server has room.

        prompt: requests of equal prompts go to one server while it has room for them.
        """
        fitting = [index for index, server in enumerate(self.servers) if server.fits(num_samples)]
        if not fitting:
            return None
        home = self._homes.get(prompt)
        if home not in fitting:
            home = min(fitting, key=lambda i: (self.servers[i].num_tokens, self.servers[i].num_samples, i))
            self._homes[prompt] = home
        self.servers[home].num_samples += num_samples
        self.servers[home].num_tokens += num_tokens
        return home

    def give_back(self, server: int, num_samples: int, num_tokens: int) -> None:
        self.servers[server].num_samples -= num_samples
        self.servers[server].num_tokens -= num_tokens
        assert self.servers[server].num_samples >= 0
        assert self.servers[server].num_tokens >= 0


@dataclass
class _Job:
    """A request that a server runs.

    owed: most tokens of each missing sample.  aborted: samples to be continued.  began_s: when, since 1970.
    """

    server: int
    client: RolloutClient
    request: GenerateRequest
    owed: dict[SampleKey, int]
    aborted: list[GenerateOutput] = field(default_factory=list)
    began_s: float = field(default_factory=time.time)


class Dispatcher:
    """Sends requests in order, each to the least loaded server; all samples of a request go to one server, which
    computes the prompt once. A sample's place is free for the next when that sample is finished, even if others of its
    request are not. A sample that somebody else aborted (`RolloutClient.pause`) is asked for again from where it is;
    its new tokens carry the version of their weights.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        on_output: Callable[[GenerateOutput], None],
        *,
        stop_when: Callable[[], bool] | None = None,
        replacements: Replacements | None = None,
    ) -> None:
        """Begins with no request.

        on_output: gets each output as soon as it arrives.
        stop_when: asked after every output and every STOP_POLL_S; when true, everything else is ended: the servers'
            running requests (those of other callers too) come back with what they have and finish reason `abort`, as
            do, without tokens, those that had not begun.
        replacements: brings lost servers back. A server that is gone, or that does not answer a request in its time
            and then no health check either, is lost: its requests go to the others, and to its successor.
        """
        self.clients = list(clients)
        self.on_output = on_output
        self.stop_when = stop_when
        self.replacements = replacements
        self.max_model_len = min(client.max_model_len for client in clients)
        self.ids: set[int | str] = set()
        # Samples that have not come back.
        self.expected: set[SampleKey] = set()
        self.came_already: set[SampleKey] = set()
        self.fruitless: dict[SampleKey, int] = {}
        self.pending: deque[GenerateRequest] = deque()
        self.running: dict[asyncio.Task[None], _Job] = {}
        self.lost: set[RolloutClient] = set()
        # Wait for a successor -> index of its server.
        self.recovering: dict[asyncio.Task[RolloutClient], int] = {}
        self.cut_connections: Counter[int | str] = Counter()
        self.health_checks = {client: asyncio.Lock() for client in clients}
        self.chooser = ServerChooser([client.max_concurrency for client in clients])
        # Tasks of running and recovering, in the order in which they ended.
        self.ended: deque[asyncio.Task[Any]] = deque()
        # An output came, a task ended, a request was added: a place is free, or `stop_when` may have another answer.
        self.came = asyncio.Event()
        self.stopping = False

    def add(self, request: GenerateRequest, *, first: bool = False) -> None:
        """Adds a request. first: before those that wait. Raises ValueError if it cannot be sent or its id was used."""
        check_request(request, self.max_model_len)
        if request.request_id in self.ids:
            raise ValueError(f"request id {request.request_id!r} is used twice")
        self.ids.add(request.request_id)
        self.expected.update(request.sample_keys())
        if first:
            self.pending.appendleft(request)
        else:
            self.pending.append(request)
        self.came.set()

    @property
    def is_idle(self) -> bool:
        """Whether all samples of all requests have come back."""
        return not (self.pending or self.running)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Runs until is_over, which is asked at every event (`came`), or until all samples are back after a stop.

        Raises RolloutError when a sample is lost or doubled, and when a server fails that `replacements`
        does not bring back; nothing is left running then.
        """
        async with contextlib.AsyncExitStack() as connections:
            for client in self.clients:
                await connections.enter_async_context(client.connected())
            try:
                while not is_over() and not (self.stopping and self.is_idle):
                    await self._advance(connections)
            finally:
                tasks = [*self.running, *self.recovering]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _advance(self, connections: contextlib.AsyncExitStack) -> None:
        if not self.stopping and self.stop_when is not None and self.stop_when():
            self.stopping = True
        if self.stopping:
            self._hand_back_pending()
            await self._abort_running()
            if not self.running:
                return
        else:
            self._start_pending()
        poll_s = STOP_POLL_S if self.stopping or self.stop_when is not None else None
        # Not `asyncio.wait` over all that runs: each output would cost as much as there are requests.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.came.wait(), poll_s)
        self.came.clear()
        while self.ended:
            task = self.ended.popleft()
            if task in self.running:
                self._end(self.running.pop(task), task)
            else:
                await self._welcome(self.recovering.pop(task), task.result(), connections)

    def _watched(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        def ended(task: asyncio.Task[T]) -> None:
            self.ended.append(task)
            self.came.set()

        task.add_done_callback(ended)
        return task

    def _start_pending(self) -> None:
        while self.pending:
            request = self.pending[0]
            owed = _tokens_to_come(request)
            server = self.chooser.assign(request.home or tuple(request.input_ids), request.n, sum(owed.values()))
            if server is None:
                break
            self.pending.popleft()
            job = _Job(server, self.clients[server], request, owed)
            self.running[self._watched(asyncio.create_task(self._serve(job)))] = job

    async def _serve(self, job: _Job) -> None:
        try:
            async for output in job.client.generate(job.request):
                output.served = (job.server, job.began_s)
                # An output that was not asked for is an error, which _collect raises.
                if output.key in job.owed:
                    self.chooser.give_back(job.server, 1, job.owed.pop(output.key))
                if output.finish_reason == ABORTED and not self.stopping:
                    job.aborted.append(output)
                else:
                    self._collect(output)
                self.came.set()
        except RolloutError as error:
            await self._failed(job, error)
        else:
            if job.owed:
                raise RolloutError(
                    f"{len(job.owed)} of {job.request.n} samples never came back, the first is {next(iter(job.owed))}"
                )
        self._continue(job)

    def _end(self, job: _Job, task: asyncio.Task[None]) -> None:
        self.chooser.give_back(job.server, len(job.owed), sum(job.owed.values()))
        if task.cancelled():  # by _lose; it may not even have begun
            self._resubmit(job)
            self._continue(job)
        else:
            task.result()

    async def ask(self, call: Callable[[RolloutClient], Awaitable[T]]) -> T:
        """Asks a server something that is no request for samples; where it is lost, another one, or its successor.

        Raises RolloutError of a server that is well, or that `replacements` does not bring back.
        """
        cut_connections = 0
        while True:
            server = next((index for index, server in enumerate(self.chooser.servers) if server.alive), None)
            if server is None:
                await asyncio.sleep(STOP_POLL_S)
                continue
            client = self.clients[server]
            try:
                return await call(client)
            except RolloutError as error:
                if self.replacements is None:
                    raise
                if not await self._is_well(client):
                    self._lose(self.replacements, server, client, error)
                    continue
                cut_connections += 1
                if not isinstance(error, ServerLostError) or cut_connections > MAX_CUT_CONNECTIONS:
                    raise

    async def _failed(self, job: _Job, error: RolloutError) -> None:
        """Asks again for the missing samples of a request that failed, if `replacements` can help; else raises it."""
        if self.replacements is not None and not await self._is_well(job.client):
            self._lose(self.replacements, job.server, job.client, error)
            self._resubmit(job)
        elif self.replacements is not None and isinstance(error, ServerLostError) and self._may_ask_again(job):
            self._resubmit(job)
        else:
            raise error

    async def _is_well(self, client: RolloutClient) -> bool:
        # Requests that fail together ask once.
        async with self.health_checks[client]:
            return client not in self.lost and await client.is_well()

    def _may_ask_again(self, job: _Job) -> bool:
        self.cut_connections[job.request.request_id] += 1
        return self.cut_connections[job.request.request_id] <= MAX_CUT_CONNECTIONS

    def _lose(self, replacements: Replacements, server: int, client: RolloutClient, error: RolloutError) -> None:
        """Marks a server as lost, and cancels its other requests, which would else wait for their own time limit."""
        if client in self.lost:
            return
        self.lost.add(client)
        self.chooser.servers[server].alive = False
        for task, job in self.running.items():
            if job.client is client and task is not asyncio.current_task():
                task.cancel()
        successor = asyncio.ensure_future(replacements.successor(client, error))
        self.recovering[self._watched(successor)] = server

    async def _welcome(self, server: int, client: RolloutClient, connections: contextlib.AsyncExitStack) -> None:
        await connections.enter_async_context(client.connected())
        self.clients[server] = client
        self.health_checks[client] = asyncio.Lock()
        self.chooser.servers[server].alive = True

    def _resubmit(self, job: _Job) -> None:
        """Puts a request with the missing samples of a job in line, as the first."""
        assert self.replacements is not None
        outputs = [output for output in _as_it_was(job.request) if output.key in job.owed]
        rest = [job.request] if len(outputs) == job.request.n else unfinished_requests([job.request], outputs)
        self.replacements.num_resubmitted += sum(request.n for request in rest)
        self.pending.extendleft(rest)

    def _continue(self, job: _Job) -> None:
        had = {output.key: len(output.output_ids) for output in job.request.progress}
        for output in job.aborted:
            got_tokens = len(output.output_ids) > had.get(output.key, 0)
            self.fruitless[output.key] = 0 if got_tokens else self.fruitless.get(output.key, 0) + 1
            if self.fruitless[output.key] > MAX_FRUITLESS_ABORTS:
                raise RolloutError(
                    f"request {output.request_id!r} sample {output.sample_index} was aborted "
                    f"{MAX_FRUITLESS_ABORTS + 1} times without a new token; see the servers' logs"
                )
        # First in line: its prompt may still be in the server's cache.
        self.pending.extendleft(unfinished_requests([job.request], job.aborted))

    def _collect(self, output: GenerateOutput) -> None:
        if output.key not in self.expected:
            came = "twice" if output.key in self.came_already else "without being asked for"
            raise RolloutError(f"sample {output.key} came {came}")
        self.expected.remove(output.key)
        self.came_already.add(output.key)
        self.on_output(output)

    def _hand_back_pending(self) -> None:
        while self.pending:
            for output in _as_it_was(self.pending.popleft()):
                self._collect(output)

    async def _abort_running(self) -> None:
        clients = {job.client for job in self.running.values()}
        results = await asyncio.gather(*(client.abort_all() for client in clients), return_exceptions=True)
        for result in results:
            # Where a server is gone, its requests fail by themselves and say so.
            if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                raise result


def _as_it_was(request: GenerateRequest) -> list[GenerateOutput]:
    """Outputs for the samples of a request that was not served, with the tokens that they had before."""
    begun = {output.key: replace(output, finish_reason=ABORTED) for output in request.progress}
    return [begun.get(key) or GenerateOutput(*key, [], [], ABORTED, NO_VERSION) for key in request.sample_keys()]


def _tokens_to_come(request: GenerateRequest) -> dict[SampleKey, int]:
    """The most tokens that each sample may still get."""
    had = {output.key: len(output.output_ids) for output in request.progress}
    return {key: request.sampling.max_new_tokens - had.get(key, 0) for key in request.sample_keys()}


async def generate_samples(
    clients: Sequence[RolloutClient],
    requests: Sequence[GenerateRequest],
    on_output: Callable[[GenerateOutput], None] | None = None,
    *,
    stop_when: Callable[[], bool] | None = None,
    replacements: Replacements | None = None,
) -> list[GenerateOutput]:
    """Generates one output per sample, ordered as the requests, then by sample index.

    Arguments as those of `Dispatcher`. Raises ValueError on a request that cannot be sent or an id that is used twice,
    RolloutError as `Dispatcher.run`; nothing is left running then.
    """
    if not clients:
        raise ValueError("generate_samples: no rollout servers")
    outputs: dict[SampleKey, GenerateOutput] = {}

    def keep(output: GenerateOutput) -> None:
        outputs[output.key] = output
        if on_output is not None:
            on_output(output)

    dispatcher = Dispatcher(clients, keep, stop_when=stop_when, replacements=replacements)
    for request in requests:
        dispatcher.add(request)
    await dispatcher.run(lambda: dispatcher.is_idle)
    return [outputs[key] for request in requests for key in request.sample_keys()]
