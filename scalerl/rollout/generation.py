"""Many prompts over several rollout servers: every sample comes back, once, finished or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scalerl.rollout.client import RolloutClient
from scalerl.rollout.requests import (
    ABORTED,
    FAILED,
    NO_VERSION,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SampleKey,
    ServerLostError,
    check_request,
    unfinished_requests,
)
from scalerl.rollout.routing import Router

# Request id -> its samples, all finished; in the order in which they were completed.
Groups = Mapping[int | str, Sequence[GenerateOutput]]

# How often `stop_when` is asked while nothing comes back, and an abort is repeated until everything has.
STOP_POLL_S = 0.05
# Aborts in a row that leave a sample without a new token, before `continue_aborted` gives up.
MAX_FRUITLESS_ABORTS = 16


async def generate_samples(
    clients: Sequence[RolloutClient],
    requests: Sequence[GenerateRequest],
    on_output: Callable[[GenerateOutput], None] | None = None,
    *,
    stop_when: Callable[[Groups], bool] | None = None,
    continue_aborted: bool = False,
    raise_errors: bool = True,
) -> list[GenerateOutput]:
    """-> one output per sample, ordered as the requests, then by sample index.

    Requests are taken in order, each by the least loaded server; all samples of a prompt go to one server, which
    computes the prompt once.

    on_output: sees each output as soon as it is there.
    stop_when: asked after every output and every STOP_POLL_S; when true, everything else is ended: the servers' running
        requests (those of other callers too), what they have comes back with finish reason `abort`, as does, without
        tokens, what had not begun. `unfinished_requests` says how to go on.
    continue_aborted: ask again for the rest of a sample that somebody else aborted (`RolloutClient.pause`) instead of
        handing it back; its new tokens carry the version of their weights.
    raise_errors: False hands the samples of a failed request back with finish reason `error`, and no further request
        to a server that went away.

    Raises ValueError on a request that cannot be sent or an id that is used twice. Raises RolloutError when a sample is
    lost or doubled, and when a server fails unless `raise_errors` is off; nothing is left running then.
    """
    if not clients:
        raise ValueError("generate_samples: no rollout servers")
    run = _Run(clients, requests, on_output, stop_when, continue_aborted, raise_errors)
    async with contextlib.AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client.connected())
        await run.to_the_end()
    lost = [key for key in run.expected if key not in run.outputs]
    if lost:
        raise RolloutError(f"{len(lost)} of {len(run.expected)} samples never came back, the first is {lost[0]}")
    return [run.outputs[key] for key in run.expected]


class _Run:
    def __init__(
        self,
        clients: Sequence[RolloutClient],
        requests: Sequence[GenerateRequest],
        on_output: Callable[[GenerateOutput], None] | None,
        stop_when: Callable[[Groups], bool] | None,
        continue_aborted: bool,
        raise_errors: bool,
    ) -> None:
        self.clients = clients
        self.on_output = on_output
        self.stop_when = stop_when
        self.continue_aborted = continue_aborted
        self.raise_errors = raise_errors
        self.expected = _expected_samples(requests, min(client.max_model_len for client in clients))
        self.sizes = {request.request_id: request.n for request in requests}
        self.outputs: dict[SampleKey, GenerateOutput] = {}
        self.finished: dict[int | str, list[GenerateOutput]] = {}
        self.complete: dict[int | str, list[GenerateOutput]] = {}
        self.fruitless: dict[SampleKey, int] = {}
        self.pending = deque(requests)
        self.running: dict[asyncio.Task[None], int] = {}
        self.router = Router([client.max_concurrency for client in clients])
        self.stopping = False
        self.last_error: RolloutError | None = None

    async def to_the_end(self) -> None:
        try:
            while self.pending or self.running:
                await self._advance()
        finally:
            for task in self.running:
                task.cancel()
            await asyncio.gather(*self.running, return_exceptions=True)

    async def _advance(self) -> None:
        if not self.stopping and self.stop_when is not None and self.stop_when(self.complete):
            self.stopping = True
        if self.stopping:
            self._hand_back_pending()
            await self._abort_running()
        else:
            self._start_pending()
        if not self.running:
            return
        poll_s = STOP_POLL_S if self.stopping or self.stop_when is not None else None
        done, _ = await asyncio.wait(self.running, timeout=poll_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self.running[task]
            task.result()

    def _start_pending(self) -> None:
        while self.pending:
            request = self.pending[0]
            num_tokens = _num_tokens_to_come(request)
            server = self.router.take(tuple(request.input_ids), request.n, num_tokens)
            if server is None:
                break
            self.pending.popleft()
            task = asyncio.create_task(self._serve(server, request, num_tokens))
            self.running[task] = server
        if self.pending and not self.router.num_alive:
            # Only after an error that was not raised.
            for request in self.pending:
                self._fail(request, RolloutError(f"request {request.request_id!r}: no server left; {self.last_error}"))
            self.pending.clear()

    async def _serve(self, server: int, request: GenerateRequest, num_tokens: int) -> None:
        aborted: list[GenerateOutput] = []
        try:
            async for output in self.clients[server].generate([request]):
                if output.finish_reason == ABORTED and self.continue_aborted and not self.stopping:
                    aborted.append(output)
                else:
                    self._collect(output)
        except RolloutError as error:
            if self.raise_errors:
                raise
            if isinstance(error, ServerLostError):
                self.router.lose(server)
            self._fail(request, error)
            return
        finally:
            self.router.give_back(server, request.n, num_tokens)
        self._continue(request, aborted)

    def _continue(self, request: GenerateRequest, aborted: list[GenerateOutput]) -> None:
        had = {output.key: len(output.output_ids) for output in request.progress}
        for output in aborted:
            got_tokens = len(output.output_ids) > had.get(output.key, 0)
            self.fruitless[output.key] = 0 if got_tokens else self.fruitless.get(output.key, 0) + 1
            if self.fruitless[output.key] > MAX_FRUITLESS_ABORTS:
                raise RolloutError(
                    f"request {request.request_id!r} sample {output.sample_index} was aborted "
                    f"{MAX_FRUITLESS_ABORTS + 1} times without a new token; see the servers' logs"
                )
        # First in line: its prompt may still be in the server's cache.
        self.pending.extendleft(unfinished_requests([request], aborted))

    def _collect(self, output: GenerateOutput) -> None:
        if output.key not in self.expected or output.key in self.outputs:
            came = "twice" if output.key in self.outputs else "without being asked for"
            raise RolloutError(f"sample {output.key} came {came}")
        self.outputs[output.key] = output
        if output.finished:
            group = self.finished.setdefault(output.request_id, [])
            group.append(output)
            if len(group) == self.sizes[output.request_id]:
                self.complete[output.request_id] = sorted(group, key=lambda o: o.sample_index)
        if self.on_output is not None:
            self.on_output(output)

    def _fail(self, request: GenerateRequest, error: RolloutError) -> None:
        self.last_error = error
        for output in _as_it_was(request):
            if output.key not in self.outputs:
                self._collect(replace(output, finish_reason=FAILED, error=str(error)))

    def _hand_back_pending(self) -> None:
        while self.pending:
            for output in _as_it_was(self.pending.popleft()):
                self._collect(output)

    async def _abort_running(self) -> None:
        servers = set(self.running.values())
        results = await asyncio.gather(*(self.clients[i].abort_all() for i in servers), return_exceptions=True)
        for result in results:
            # Where a server is gone, its requests fail by themselves and say so.
            if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                raise result


def _as_it_was(request: GenerateRequest) -> list[GenerateOutput]:
    """The samples of a request that was not served."""
    begun = {output.key: replace(output, finish_reason=ABORTED, error=None) for output in request.progress}
    return [begun.get(key) or GenerateOutput(*key, [], [], ABORTED, NO_VERSION) for key in request.sample_keys()]


def _num_tokens_to_come(request: GenerateRequest) -> int:
    """At most; what a server owes for the request."""
    return request.n * request.sampling.max_new_tokens - sum(len(output.output_ids) for output in request.progress)


def _expected_samples(requests: Sequence[GenerateRequest], max_model_len: int) -> dict[SampleKey, None]:
    expected: dict[SampleKey, None] = {}
    ids: set[int | str] = set()
    for request in requests:
        check_request(request, max_model_len)
        if request.request_id in ids:
            raise ValueError(f"generate_samples: request id {request.request_id!r} is used twice")
        ids.add(request.request_id)
        expected.update(dict.fromkeys(request.sample_keys()))
    return expected
