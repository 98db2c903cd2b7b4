"""What making a sample costs the process that makes it, however many others run meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from scalerl.data import PromptRow
from scalerl.rollout.program import Sample, single_turn
from scalerl.rollout.samples import SampleRequest, make_samples
from scalerl.rollout.servers.requests import GenerateOutput, GenerateRequest, SamplingParams

NUM_CLIENTS = 4


class OneByOne:
    """In the place of a client: begins all requests, and answers one after the other, while the others wait."""

    max_model_len, max_concurrency = 64, 10**6

    def __init__(self, waiting: list[asyncio.Future[None]]) -> None:
        self.waiting = waiting

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        yield

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        await answer
        yield GenerateOutput(request.request_id, 0, [5], [-0.5], "stop", 1)


async def calls_per_sample(num_samples: int) -> float:
    """Calls of Python and C functions from the first answer to the last sample, per sample."""
    waiting, samples = list[asyncio.Future[None]](), list[Sample]()
    clients = [OneByOne(waiting) for _ in range(NUM_CLIENTS)]
    prompts = [PromptRow(uid, [1, uid], 2, "source", "truth", {}, [], "rule") for uid in range(num_samples)]
    requests = [SampleRequest(prompt.uid, 0, prompt, SamplingParams(8), seed=prompt.uid) for prompt in prompts]
    making = asyncio.ensure_future(make_samples(clients, requests, single_turn, None, samples.append))  # type: ignore[arg-type]
    while len(waiting) < num_samples:
        await asyncio.sleep(0)
    num_calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        for number in range(num_samples):
            waiting[number].set_result(None)
            while len(samples) <= number:
                await asyncio.sleep(0)
    finally:
        sys.setprofile(profiler)
    assert await making == {} and len(samples) == num_samples
    return num_calls / num_samples


def test_a_sample_that_ends_costs_the_same_whatever_runs_beside_it() -> None:
    """Its end comes by a queue: were all that runs waited for anew, 2,000 would cost ten times what 200 do."""
    few, many = asyncio.run(calls_per_sample(200)), asyncio.run(calls_per_sample(2000))
    assert many == pytest.approx(few, rel=0.1), f"{few:.0f} calls a sample with 200, {many:.0f} with 2,000"
