"""Many prompts over several rollout servers: every sample comes back, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from scalerl.rollout.client import GenerateOutput, GenerateRequest, RolloutClient, RolloutError, work_units


async def generate_samples(
    clients: Sequence[RolloutClient],
    requests: Sequence[GenerateRequest],
    on_output: Callable[[GenerateOutput], None] | None = None,
) -> list[GenerateOutput]:
    """-> outputs ordered as the requests, then by sample index; `on_output` sees each as soon as it is there.

    Requests are taken in order, each by the server with the fewest samples in flight (all samples of a prompt on one
    server, which computes the prompt once). Raises ValueError on a request id that is used twice, RolloutError when a
    server fails or a sample is lost or doubled; nothing is left running then.
    """
    if not clients:
        raise ValueError("generate_samples: no rollout servers")
    expected = _expected_samples(requests)
    outputs: dict[tuple[int | str, int], GenerateOutput] = {}

    def collect(output: GenerateOutput) -> None:
        key = (output.request_id, output.sample_index)
        if key not in expected or key in outputs:
            raise RolloutError(f"sample {key} came {'twice' if key in outputs else 'without being asked for'}")
        outputs[key] = output
        if on_output is not None:
            on_output(output)

    async with contextlib.AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client.connected())
        await _dispatch(clients, requests, collect)
    lost = [key for key in expected if key not in outputs]
    if lost:
        raise RolloutError(f"{len(lost)} of {len(expected)} samples never came back, the first is {lost[0]}")
    return [outputs[key] for key in expected]


async def _dispatch(
    clients: Sequence[RolloutClient], requests: Sequence[GenerateRequest], collect: Callable[[GenerateOutput], None]
) -> None:
    in_flight = [0] * len(clients)

    async def run(server: int, unit: list[GenerateRequest], num_samples: int) -> None:
        async for output in clients[server].generate(unit):
            collect(output)
        in_flight[server] -= num_samples

    tasks: set[asyncio.Task[None]] = set()
    try:
        for unit in _units(clients, requests):
            num_samples = sum(request.n for request in unit)
            while True:
                server = min(range(len(clients)), key=lambda index: (in_flight[index], index))
                if in_flight[server] == 0 or in_flight[server] + num_samples <= clients[server].max_concurrency:
                    break
                tasks = await _wait_for_one(tasks)
            in_flight[server] += num_samples
            tasks.add(asyncio.create_task(run(server, unit, num_samples)))
        while tasks:
            tasks = await _wait_for_one(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_one(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """-> the tasks that still run; raises what a finished one raised."""
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running


def _units(clients: Sequence[RolloutClient], requests: Sequence[GenerateRequest]) -> list[list[GenerateRequest]]:
    kinds = {client.kind for client in clients}
    if len(kinds) != 1:
        raise ValueError(f"generate_samples: the servers are of different kinds: {sorted(kinds)}")
    # A batch of the embedded engine is no larger than an even share, so that no server is left without work.
    share = -(-sum(request.n for request in requests) // len(clients))
    return list(work_units(requests, kinds.pop(), min(share, *(client.max_concurrency for client in clients))))


def _expected_samples(requests: Sequence[GenerateRequest]) -> dict[tuple[int | str, int], None]:
    expected: dict[tuple[int | str, int], None] = {}
    for request in requests:
        if (request.request_id, 0) in expected:
            raise ValueError(f"generate_samples: request id {request.request_id!r} is used twice")
        if request.n < 1:
            raise ValueError(
                f"generate_samples: request {request.request_id!r} asks for n={request.n} samples; at least 1"
            )
        expected.update(dict.fromkeys((request.request_id, index) for index in range(request.n)))
    return expected
