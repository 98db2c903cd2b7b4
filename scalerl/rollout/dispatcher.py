"""`Dispatcher`: spreads requests over several rollout servers, and takes more while others run.

`ServerChooser` chooses the server of a request: the least loaded one, or the one that has the prompt already.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

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

T = TypeVar("T")

# How often `stop_when` is asked while no output arrives, and an abort is repeated until all outputs have.
STOP_POLL_S = 0.05
# Aborts in a row that leave a sample without a new token, before `continue_aborted` gives up.
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
    _servers: list[_Server] = field(init=False)
    _homes: dict[Hashable, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._servers = [_Server(limit) for limit in self.max_samples]

    def assign(self, prompt: Hashable, num_samples: int, num_tokens: int) -> int | None:
        """Returns the index of a server, which now owes these samples and tokens; None when no server has room.

        prompt: requests of equal prompts go to one server while it has room for them.
        """
        fitting = [index for index, server in enumerate(self._servers) if server.fits(num_samples)]
        if not fitting:
            return None
        home = self._homes.get(prompt)
        if home not in fitting:
            home = min(fitting, key=lambda i: (self._servers[i].num_tokens, self._servers[i].num_samples, i))
            self._homes[prompt] = home
        self._servers[home].num_samples += num_samples
        self._servers[home].num_tokens += num_tokens
        return home

    def give_back(self, server: int, num_samples: int, num_tokens: int) -> None:
        self._servers[server].num_samples -= num_samples
        self._servers[server].num_tokens -= num_tokens
        assert self._servers[server].num_samples >= 0
        assert self._servers[server].num_tokens >= 0

    def lose(self, server: int) -> None:
        """Marks a server as lost: it gets no request until `restore`."""
        self._servers[server].alive = False

    def restore(self, server: int) -> None:
        """Marks a lost server as serving again, so that it gets requests."""
        self._servers[server].alive = True

    def loads(self) -> list[tuple[int, int]]:
        """The load of each server, as (tokens, samples) in flight."""
        return [(server.num_tokens, server.num_samples) for server in self._servers]


class Recovery(Protocol):
    """Whoever brings lost servers back, as a Dispatcher calls it."""

    async def restarted(self, server: int, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        """Waits until the server of this index serves again, with the weights of this generation, and returns its
        client. Raises what ends the generation."""
        ...

    def resubmitted(self, request: GenerateRequest) -> None:
        """Counts a request for missing samples that is sent again: its server was lost, or cut the connection."""
        ...


@dataclass
class _Job:
    """Requests that a server runs by one call.

    owed: most tokens of each missing sample.  aborted: samples to be continued.
    """

    server: int
    client: RolloutClient
    requests: list[GenerateRequest]
    owed: dict[SampleKey, int]
    aborted: list[GenerateOutput] = field(default_factory=list)


class Dispatcher:
    """Sends requests in order, each to the least loaded server; all samples of a request go to one server, which
    computes the prompt once. Requests that begin together on a server share a call where its engine answers several. A
    sample's place is free for the next when that sample is finished, even if others of its request are not.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient],
        on_output: Callable[[GenerateOutput], None],
        *,
        stop_when: Callable[[], bool] | None = None,
        continue_aborted: bool = False,
        recovery: Recovery | None = None,
    ) -> None:
        """Begins with no request.

        on_output: gets each output as soon as it arrives.
        stop_when: asked after every output and every STOP_POLL_S; when true, everything else is ended: the servers'
            running requests (those of other callers too) come back with what they have and finish reason `abort`, as
            do, without tokens, those that had not begun.
        continue_aborted, recovery: as `generation.generate_samples`.
        """
        self.clients = list(clients)
        self.on_output = on_output
        self.stop_when = stop_when
        self.continue_aborted = continue_aborted
        self.recovery = recovery
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

        Raises RolloutError when a sample is lost or doubled, and when a server fails that `recovery` does not bring
        back; nothing is left running then.
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
        together: dict[int, _Job] = {}
        while self.pending:
            request = self.pending[0]
            owed = _tokens_to_come(request)
            server = self.chooser.assign(request.home or tuple(request.input_ids), request.n, sum(owed.values()))
            if server is None:
                break
            self.pending.popleft()
            client = self.clients[server]
            if client.answers_several and server in together:
                together[server].requests.append(request)
                together[server].owed |= owed
                continue
            job = together[server] = _Job(server, client, [request], owed)
            # Its requests are complete when it begins: in the loop's next round.
            self.running[self._watched(asyncio.create_task(self._serve(job)))] = job

    async def _serve(self, job: _Job) -> None:
        try:
            async for output in job.client.generate(job.requests):
                self._give_back(job, output)
                if output.finish_reason == ABORTED and self.continue_aborted and not self.stopping:
                    job.aborted.append(output)
                else:
                    self._collect(output)
                self.came.set()
        except RolloutError as error:
            await self._failed(job, error)
        else:
            if job.owed:
                lost, asked = next(iter(job.owed)), sum(request.n for request in job.requests)
                raise RolloutError(f"{len(job.owed)} of {asked} samples never came back, the first is {lost}")
        self._continue(job)

    def _give_back(self, job: _Job, output: GenerateOutput) -> None:
        # An output that was not asked for is an error, which _collect raises.
        if output.key in job.owed:
            self.chooser.give_back(job.server, 1, job.owed.pop(output.key))

    def _end(self, job: _Job, task: asyncio.Task[None]) -> None:
        self.chooser.give_back(job.server, len(job.owed), sum(job.owed.values()))
        if task.cancelled():  # by _lose; it may not even have begun
            self._resubmit(job)
            self._continue(job)
        else:
            task.result()

    async def _failed(self, job: _Job, error: RolloutError) -> None:
        """Asks again for the missing samples of a call that failed, if `recovery` can help; else raises it."""
        if self.recovery is not None and not await self._is_well(job):
            self._lose(job, error)
            self._resubmit(job)
        elif self.recovery is not None and isinstance(error, ServerLostError) and self._may_ask_again(job):
            self._resubmit(job)
        else:
            raise error

    async def _is_well(self, job: _Job) -> bool:
        # Requests that fail together ask once.
        async with self.health_checks[job.client]:
            return job.client not in self.lost and await job.client.is_well()

    def _may_ask_again(self, job: _Job) -> bool:
        ids = [request.request_id for request in _rest(job)]
        self.cut_connections.update(ids)
        return all(self.cut_connections[request_id] <= MAX_CUT_CONNECTIONS for request_id in ids)

    def _lose(self, job: _Job, error: RolloutError) -> None:
        """Marks a server as lost, and cancels its other requests, which would else wait for their own time limit."""
        if job.client in self.lost:
            return
        assert self.recovery is not None
        self.lost.add(job.client)
        self.chooser.lose(job.server)
        for task, other in self.running.items():
            if other.client is job.client and task is not asyncio.current_task():
                task.cancel()
        restarted = asyncio.ensure_future(self.recovery.restarted(job.server, job.client, error))
        self.recovering[self._watched(restarted)] = job.server

    async def _welcome(self, server: int, client: RolloutClient, connections: contextlib.AsyncExitStack) -> None:
        await connections.enter_async_context(client.connected())
        self.clients[server] = client
        self.health_checks[client] = asyncio.Lock()
        self.chooser.restore(server)

    def _resubmit(self, job: _Job) -> None:
        assert self.recovery is not None
        rest = _rest(job)
        for request in rest:
            self.recovery.resubmitted(request)
        self.pending.extendleft(reversed(rest))

    def _continue(self, job: _Job) -> None:
        had = {output.key: len(output.output_ids) for request in job.requests for output in request.progress}
        for output in job.aborted:
            got_tokens = len(output.output_ids) > had.get(output.key, 0)
            self.fruitless[output.key] = 0 if got_tokens else self.fruitless.get(output.key, 0) + 1
            if self.fruitless[output.key] > MAX_FRUITLESS_ABORTS:
                raise RolloutError(
                    f"request {output.request_id!r} sample {output.sample_index} was aborted "
                    f"{MAX_FRUITLESS_ABORTS + 1} times without a new token; see the servers' logs"
                )
        # First in line: its prompt may still be in the server's cache.
        self.pending.extendleft(reversed(unfinished_requests(job.requests, job.aborted)))

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


def _rest(job: _Job) -> list[GenerateRequest]:
    """The requests of a job that have missing samples, with these alone."""
    rest = []
    for request in job.requests:
        outputs = [output for output in _as_it_was(request) if output.key in job.owed]
        rest += [request] if len(outputs) == request.n else unfinished_requests([request], outputs)
    return rest


def _tokens_to_come(request: GenerateRequest) -> dict[SampleKey, int]:
    """The most tokens that each sample may still get."""
    had = {output.key: len(output.output_ids) for output in request.progress}
    return {key: request.sampling.max_new_tokens - had.get(key, 0) for key in request.sample_keys()}
