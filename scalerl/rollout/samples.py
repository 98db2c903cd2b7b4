"""`make_samples`: makes many samples at a time on several rollout servers, each by its own run of a program."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalerl.config.schema import ProgramConfig
from scalerl.rollout.dispatcher import STOP_POLL_S, Dispatcher
from scalerl.rollout.program import Ask, Program, Sample, Servers, Tools, attempt_program
from scalerl.rollout.servers.client import RolloutClient
from scalerl.rollout.servers.requests import (
    ABORTED,
    NO_VERSION,
    GenerateOutput,
    GenerateRequest,
    RolloutError,
    SampleKey,
    SamplingParams,
    unfinished_requests,
)

if TYPE_CHECKING:
    from scalerl.data import PromptRow
    from scalerl.data.pictures import Picture, PictureProcessor
    from scalerl.models.routing import RoutingShape
    from scalerl.rollout.servers.recovery import Replacements


@dataclass(frozen=True)
class SampleRequest:
    """One sample of a group. seed: fixes what it draws on the embedded engine.  asks: the turns of an interrupted
    program (`Servers.asks`); () begins anew.  routing, max_prompt_length: as `Servers`.  pictures: come with those of
    the prompt, which the samples of a group share; None: it has none."""

    uid: int
    sample_index: int
    prompt: PromptRow
    sampling: SamplingParams
    seed: int
    asks: Sequence[Ask] = ()
    routing: RoutingShape | None = None
    max_prompt_length: int | None = None
    pictures: asyncio.Future[list[Picture]] | None = None


async def make_samples(
    clients: Sequence[RolloutClient],
    requests: Sequence[SampleRequest],
    program: Program,
    tokenizer: Any,
    on_sample: Callable[[Sample], None],
    *,
    config: ProgramConfig | None = None,
    stop_when: Callable[[], bool] | None = None,
    replacements: Replacements | None = None,
    processor: PictureProcessor | None = None,
) -> dict[tuple[int, int], list[Ask]]:
    """Makes the samples. Returns (uid, sample_index) -> the turns so far of each unfinished one; {} unless stopped.

    on_sample: gets each sample as soon as its program returns.
    config: limits of the program; None: the defaults.
    stop_when: as `Dispatcher.stop_when`; programs are cancelled then.
    replacements: as `Dispatcher`'s. A paused turn is continued under the weights that follow.
    processor: of the policy's pictures; None: it takes none.

    A program never has to ask again: turns come whole, despite lost servers and pauses. Raises what a program
    raises, as `run_program`, and what `Dispatcher.run` raises; nothing is left running then.
    """
    turns = _Turns()
    dispatcher = Dispatcher(clients, turns.accept, stop_when=stop_when, replacements=replacements)
    turns.dispatcher = dispatcher
    samples = [
        Servers(
            turns.make,
            request.prompt.input_ids,
            request.sampling,
            uid=request.uid,
            sample_index=request.sample_index,
            seed=request.seed,
            routing=request.routing,
            max_prompt_length=request.max_prompt_length,
            asks=request.asks,
            ask_server=dispatcher.ask,
            placeholders=() if processor is None else processor.placeholders,
        )
        for request in requests
    ]
    config = config or ProgramConfig()
    at_a_time = asyncio.Semaphore(config.max_running or max(1, len(requests)))
    failed: list[BaseException] = []
    unfinished: set[Servers] = set(samples)

    async def make(request: SampleRequest, servers: Servers) -> None:
        tools = Tools(tokenizer, request.seed, processor)
        try:
            async with at_a_time:
                if request.pictures is not None:
                    servers.pictures = await request.pictures
                sample = await attempt_program(program, request.prompt, servers, tools, config)
            on_sample(sample)
            unfinished.remove(servers)
        except Exception as error:
            failed.append(error)
        except asyncio.CancelledError:
            # The program cancelled itself, unless this generation is over.
            failed.append(RolloutError(f"the program of prompt {request.prompt.uid} cancelled itself"))
            raise
        finally:
            dispatcher.came.set()

    def is_over() -> bool:
        if failed:
            raise failed[0]
        return not unfinished

    tasks = {
        servers: asyncio.ensure_future(make(request, servers))
        for request, servers in zip(requests, samples, strict=True)
    }
    try:
        await dispatcher.run(is_over)
        # A program whose last turn came with the stop needs but a moment.
        ending = [tasks[servers] for servers in unfinished - turns.waiting_samples()]
        if ending:
            await asyncio.wait(ending, timeout=STOP_POLL_S)
        is_over()
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {(servers.uid, servers.sample_index): servers.record() for servers in samples if servers in unfinished}


def turn_seed(seed: int, number: int) -> int:
    """The seed of a sample's turn, 63 bits; the first turn has the sample's seed. number: index of the turn."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class _Waiting:
    """A program that waits for a turn."""

    sample: Servers
    number: int
    ask: Ask
    answer: asyncio.Future[GenerateOutput]


class _Turns:
    """Sends the turns that programs ask for. Samples of a group that ask for the same at the same time share a request,
    whose prompt is computed once."""

    dispatcher: Dispatcher

    def __init__(self) -> None:
        # Asked for, and not sent yet.
        self.asked: list[_Waiting] = []
        self.sent: dict[SampleKey, _Waiting] = {}
        self.numbers = itertools.count()

    def make(self, sample: Servers, number: int, ask: Ask) -> asyncio.Future[GenerateOutput]:
        """Asks for a turn of a sample, as `program.TurnMaker`."""
        loop = asyncio.get_running_loop()
        if not self.asked:
            # After all programs that run in this round of the loop.
            loop.call_soon(self._send)
        waiting = _Waiting(sample, number, ask, loop.create_future())
        self.asked.append(waiting)
        return waiting.answer

    def waiting_samples(self) -> set[Servers]:
        return {waiting.sample for waiting in (*self.asked, *self.sent.values())}

    def accept(self, output: GenerateOutput) -> None:
        """Hands an output to the program that waits for it, as `Dispatcher.on_output`.

        A turn that a stop interrupted is kept for the next generation; its program goes no further in this one.
        """
        waiting = self.sent[output.key]
        waiting.ask.output = output
        if output.finished:
            del self.sent[output.key]
            if not waiting.answer.done():
                waiting.answer.set_result(output)

    def _send(self) -> None:
        asked, self.asked = self.asked, []
        for together in _alike(asked):
            request = _request(f"{together[0].sample.uid}/{next(self.numbers)}", together)
            self.sent |= dict(zip(request.sample_keys(), together, strict=True))
            try:
                # A program that is under way comes before those that have not begun.
                self.dispatcher.add(request, first=together[0].number > 0)
            except ValueError as error:
                for waiting in together:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)


def _alike(asked: Sequence[_Waiting]) -> list[list[_Waiting]]:
    """Groups turns of equal input and sampling parameters, in the order of the first of each."""
    shared: list[list[_Waiting]] = []
    by_uid: dict[int, list[list[_Waiting]]] = {}
    for waiting in asked:
        known = by_uid.setdefault(waiting.sample.uid, [])
        together = next((others for others in known if others[0].ask.is_for_the_same(waiting.ask)), None)
        if together is None:
            together = []
            known.append(together)
            shared.append(together)
        together.append(waiting)
    return shared


def _request(request_id: str, together: Sequence[_Waiting]) -> GenerateRequest:
    first = together[0]
    request = GenerateRequest(
        request_id=request_id,
        input_ids=first.ask.input_ids,
        n=len(together),
        sampling=first.ask.sampling,
        seeds=[turn_seed(waiting.sample.seed, waiting.number) for waiting in together],
        # The first turn's server has most of the input in its cache.
        home=tuple(first.sample.prompt_ids),
        routing=first.sample.routing,
        routed_from=first.ask.routed_from,
        pictures=first.ask.pictures,
    )
    before = [waiting.ask.output or GenerateOutput("", 0, [], [], ABORTED, NO_VERSION) for waiting in together]
    if not any(output.output_ids for output in before):
        return request
    progress = [replace(output, request_id=request_id, sample_index=index) for index, output in enumerate(before)]
    return unfinished_requests([request], progress)[0]
