"""Servers that are killed, stopped or cut off while they generate: every sample comes back once, as it would have."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from scalerl.rollout.dispatcher import Dispatcher, generate_samples
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, RolloutError, SamplingParams
from scalerl.rollout.servers.requests import ServerLostError
from scalerl.rollout.servers.supervise import descendants
from tests.lanes import full
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
REQUESTS = [
    GenerateRequest(index, PROMPTS[index % len(PROMPTS)], 2, LONG, [2 * index, 2 * index + 1]) for index in range(8)
]
# Two requests at a time, so that most are still to come when the first is done.
CONCURRENCY = 4
REQUEST_TIMEOUT_S = 60.0
# After which one that hangs is noticed; as long again, and it is known not to be well.
HANG_TIMEOUT_S = 10.0


def client_of(engine: Engine, timeout_s: float = REQUEST_TIMEOUT_S) -> RolloutClient:
    url = engine.server.url
    return RolloutClient(
        url,
        engine.kind,
        key=engine.server.key,
        max_model_len=MAX_MODEL_LEN,
        timeout_s=timeout_s,
        max_concurrency=CONCURRENCY,
    )


class Restart:
    """Replacements that start another server, as the host of a replica does."""

    def __init__(self, start: Callable[[], RolloutClient]) -> None:
        self.start = start
        self.lost: list[str] = []
        self.num_resubmitted = 0

    async def successor(self, lost: RolloutClient, error: RolloutError) -> RolloutClient:
        self.lost.append(lost.url)
        return await asyncio.to_thread(self.start)


def send(engine: Engine, signum: int) -> None:
    """To the server and all that it started."""
    for pid in descendants(engine.server._supervisor.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def bits(outputs: list[GenerateOutput]) -> list[tuple[object, ...]]:
    return [(o.key, o.output_ids, o.logprobs, o.finish_reason, o.version_spans) for o in outputs]


@pytest.fixture(scope="module")
def well(start_engine: Callable[..., Engine], model_a: Model) -> Iterator[Engine]:
    """A server that no test harms."""
    engine = start_engine("embedded", model_a.path)
    yield engine
    engine.server.stop()


@pytest.fixture(scope="module")
def undisturbed(well: Engine) -> list[tuple[object, ...]]:
    return bits(asyncio.run(generate_samples([client_of(well)], REQUESTS)))


@functools.cache
def unanswered() -> socket.socket:
    """Nobody listens there, and no server takes its port."""
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    return holder


def gone() -> RolloutClient:
    """Of a server that is there no more."""
    return RolloutClient(
        f"http://127.0.0.1:{unanswered().getsockname()[1]}", "embedded", key="", max_model_len=MAX_MODEL_LEN
    )


@pytest.mark.parametrize(("has_other", "signum"), [full(False, signal.SIGKILL), (True, signal.SIGSTOP)])
def test_a_server_that_dies_or_hangs_costs_no_sample(
    has_other: bool,
    signum: int,
    well: Engine,
    start_engine: Callable[..., Engine],
    model_a: Model,
    undisturbed: list[tuple[object, ...]],
) -> None:
    engine = start_engine("embedded", model_a.path)
    # A first request takes longer, and is not to be taken for one that hangs.
    asyncio.run(generate_samples([client_of(engine)], REQUESTS[:1]))
    timeout_s = HANG_TIMEOUT_S if signum == signal.SIGSTOP else REQUEST_TIMEOUT_S
    recovery = Restart(lambda: client_of(start_engine("embedded", model_a.path)))
    clients = [client_of(engine, timeout_s)] + ([client_of(well)] if has_other else [])
    seen = []

    def strike_once(output: GenerateOutput) -> None:
        if not seen:
            send(engine, signum)
        seen.append(output.key)

    outputs = asyncio.run(generate_samples(clients, REQUESTS, strike_once, replacements=recovery))
    assert bits(outputs) == undisturbed
    assert sorted(seen) == [output.key for output in outputs]
    assert recovery.lost == [engine.server.url]
    assert recovery.num_resubmitted > 0
    engine.server.stop()


def test_the_others_go_on_while_one_comes_back(well: Engine, undisturbed: list[tuple[object, ...]]) -> None:
    """It never does here, and the generation does not wait for it."""

    class Never(Restart):
        async def successor(self, *args: object) -> RolloutClient:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    never = Never(lambda: None)
    outputs = asyncio.run(generate_samples([gone(), client_of(well)], REQUESTS, replacements=never))
    assert bits(outputs) == undisturbed
    assert never.num_resubmitted > 0


@pytest.mark.parametrize("has_other", [False, True])
def test_a_parser_is_asked_of_a_server_that_is_there(has_other: bool, well: Engine) -> None:
    """A server is found to be lost by a request for no sample too. Another one answers, else its successor."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = 'I add <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    recovery = Restart(lambda: client_of(well))
    clients = [gone(), *([client_of(well)] if has_other else [])]
    dispatcher = Dispatcher(clients, lambda output: None, replacements=recovery)

    async def parsed() -> tuple[str, list[dict[str, str]]]:
        asked = asyncio.ensure_future(dispatcher.ask(lambda client: client.parse_tool_calls(text, "qwen25", tools)))
        asked.add_done_callback(lambda _: dispatcher.came.set())
        await dispatcher.run(asked.done)
        return asked.result()

    text, calls = asyncio.run(parsed())
    assert (text.strip(), calls) == ("I add", [{"name": "add", "arguments": '{"a": 1}'}])
    assert recovery.lost == [gone().url]


def test_a_server_that_does_not_come_back_ends_the_generation() -> None:
    def refuse() -> RolloutClient:
        raise RolloutError("its last words")

    with pytest.raises(RolloutError, match="its last words"):
        asyncio.run(generate_samples([gone()], REQUESTS, replacements=Restart(refuse)))


@contextlib.asynccontextmanager
async def cutting_proxy(url: str, num_cut: int) -> AsyncIterator[str]:
    """In front of a server; closes the first connections that bring a request to generate."""
    host, port = url.removeprefix("http://").split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_cut
        first = await reader.read(65536)
        if first.startswith(b"POST /generate") and num_cut > 0:
            num_cut -= 1
            writer.close()
            return
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        server_writer.write(first)
        await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(("num_cut", "survives"), [(2, True), (100, False)])
def test_a_cut_connection_to_a_server_that_is_well_is_no_loss(
    num_cut: int, survives: bool, well: Engine, undisturbed: list[tuple[object, ...]]
) -> None:
    recovery = Restart(lambda: pytest.fail("it was restarted"))

    async def run() -> list[GenerateOutput]:
        async with cutting_proxy(well.server.url, num_cut) as url:
            client = client_of(well)
            client.url = url
            return await generate_samples([client], REQUESTS, replacements=recovery)

    if survives:
        assert bits(asyncio.run(run())) == undisturbed
        assert recovery.num_resubmitted == 2 * num_cut
    else:
        with pytest.raises(RolloutError, match="went away during request"):
            asyncio.run(run())


def test_samples_that_came_before_a_connection_is_cut_are_kept(
    well: Engine, undisturbed: list[tuple[object, ...]]
) -> None:
    class Cut(RolloutClient):
        """The first answer breaks off behind its first sample."""

        num_cut = 0

        async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
            async with contextlib.aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    yield output
                    if not self.num_cut:
                        self.num_cut += 1
                        raise ServerLostError("cut off")

    recovery = Restart(lambda: pytest.fail("it was restarted"))
    client = Cut(
        well.server.url, "embedded", key=well.server.key, max_model_len=MAX_MODEL_LEN, max_concurrency=CONCURRENCY
    )
    seen: list[object] = []
    outputs = asyncio.run(
        generate_samples([client], REQUESTS, lambda output: seen.append(output.key), replacements=recovery)
    )
    assert bits(outputs) == undisturbed
    assert len(seen) == len(set(seen)) == len(outputs)
    # The other sample of the first request.
    assert recovery.num_resubmitted == 1


def test_a_request_that_takes_too_long_on_a_server_that_is_well_says_so(well: Engine) -> None:
    class Impatient(RolloutClient):
        """The server itself has the time that a loaded machine takes."""

        async def is_well(self) -> bool:
            self.timeout_s = REQUEST_TIMEOUT_S
            return await super().is_well()

    recovery = Restart(lambda: pytest.fail("it was restarted"))
    client = client_of(well)
    client.__class__ = Impatient

    async def run() -> None:
        client.pause()
        client.timeout_s = 1.0
        await generate_samples([client], REQUESTS[:1], replacements=recovery)

    with pytest.raises(RolloutError, match="request_timeout_s"):
        asyncio.run(run())
    client_of(well).continue_generation()


@pytest.mark.parametrize("kind", ["embedded", full("sglang")])
def test_health_is_that_of_the_engine_paused_or_not(
    kind: str, start_engine: Callable[..., Engine], model_a: Model
) -> None:
    engine = start_engine(kind, model_a.path)
    client = client_of(engine, timeout_s=60.0)
    assert asyncio.run(client.is_well())
    client.pause()
    assert asyncio.run(client.is_well())
    client.continue_generation()
    client.release(["kv_cache", "weights"])
    assert asyncio.run(client.is_well())
    client.resume(["weights", "kv_cache"])

    # SGLang's HTTP server and the scheduler are processes of their own.
    below = descendants(engine.server._supervisor.pid)
    engines = [pid for pid in below if kind == "embedded" or b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(engines) == 1
    for paused in (False, True):
        if paused:
            client.pause()
        os.kill(engines[0], signal.SIGSTOP)
        # Somebody who did not pause it asks.
        assert not asyncio.run(client_of(engine, timeout_s=2.0).is_well())
        os.kill(engines[0], signal.SIGCONT)
        assert asyncio.run(client_of(engine, timeout_s=60.0).is_well())
    engine.server.stop()
    assert not asyncio.run(client.is_well())
