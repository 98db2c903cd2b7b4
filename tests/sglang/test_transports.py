"""Weights that reach a server over a process group: the same contract for both engines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scalerl.parallel.export import Needed
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, Replica, RolloutClient, RolloutError, SamplingParams
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from scalerl.rollout.servers.supervise import descendants
from scalerl.rollout.servers.update_group import address_towards, in_sending_order, pack_bytes
from scalerl.rollout.sync.session import Feed, SyncSession
from scalerl.rollout.sync.transports.broadcast import BroadcastTransport
from scalerl.rollout.sync.transports.memory import GatheredTransport
from tests.lanes import full
from tests.served_weights import expected_checksums
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, START_TIMEOUT_S, Engine, Model, rollout_config

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
NUM_BUCKETS = 3
NamedTensors = Sequence[tuple[str, Tensor]]


def exporter(weights: NamedTensors, before: Callable[[int], None] = lambda number: None) -> Callable:
    """Weights in buckets whose memory is overwritten as soon as the next is asked for. before: called with its number.

    Of matrices every second comes with other strides.
    """

    def export(bucket_bytes: int, needed: Needed) -> Iterator[NamedTensors]:
        size = -(-len(weights) // NUM_BUCKETS)
        for number, first in enumerate(range(0, len(weights), size)):
            before(number)
            bucket = [(name, tensor.clone()) for name, tensor in weights[first : first + size]]
            bucket[::2] = [(name, x.t().contiguous().t() if x.ndim == 2 else x) for name, x in bucket[::2]]
            yield bucket
            for _, tensor in bucket:
                tensor.fill_(float("nan"))

    return export


def deliver(
    transport: BroadcastTransport | GatheredTransport,
    engines: Sequence[Engine],
    config: dict,
    policy_version: int,
    tp_size: int = 1,
) -> SyncSession:
    """A whole sync, as one trainer rank that leads all of the engines does it."""
    feeds = [Feed(index, Replica(e.server.url, e.kind, tp_size, e.server.key), (0,)) for index, e in enumerate(engines)]
    expected = {feed.index: feed.replica.expected_checksums(config) for feed in feeds}
    clients = {engine.server.url: engine.client for engine in engines}
    session = SyncSession(feeds, clients, expected, rank=0, policy_version=policy_version, bucket_bytes=1, verify=True)
    for feed in feeds:
        session.call(feed, "begin", lambda client: client.begin_weight_update())
    transport.send(session)
    for feed in feeds:
        session.call(feed, "end", lambda client: client.end_weight_update(policy_version))
    return session


def assert_serves(engine: Engine, model: Model, session: SyncSession, index: int = 0) -> None:
    assert checksum_differences(session.expected[index].result(), engine.client.checksums()) == []
    requests = [GenerateRequest(row, prompt, 1, GREEDY, [0]) for row, prompt in enumerate(PROMPTS)]
    for prompt, output in zip(PROMPTS, engine.generate(requests), strict=True):
        assert output.output_ids == model.greedy(prompt, GREEDY.max_new_tokens)
        assert output.policy_version == session.policy_version


@pytest.fixture
def transport_of() -> Iterator[Callable[..., BroadcastTransport]]:
    made = []

    def make(weights: NamedTensors, before: Callable[[int], None] = lambda number: None) -> BroadcastTransport:
        made.append(BroadcastTransport(exporter(weights, before), backend="gloo", timeout_s=60.0))
        return made[-1]

    yield make
    for transport in made:
        for index in list(transport.groups):
            transport.forget(index)


@pytest.mark.shows("sync", "serve", family="qwen3", server="shared_engine")
def test_a_broadcast_is_what_the_engine_serves(
    engine: Engine, model_a: Model, model_b: Model, transport_of: Callable[..., BroadcastTransport]
) -> None:
    config = model_a.hf.config.to_dict()
    transport = transport_of(model_b.weights())
    first = deliver(transport, [engine], config, 3)
    assert first.failed == {}
    assert_serves(engine, model_b, first)
    # The group is kept from sync to sync.
    groups = dict(transport.groups)
    second = deliver(transport, [engine], config, 4)
    assert second.failed == {} and transport.groups == groups
    assert_serves(engine, model_b, second)
    # One number of one tensor.
    spoiled = [(name, tensor.clone()) for name, tensor in model_b.weights()]
    name, tensor = next((name, tensor) for name, tensor in spoiled if name.endswith("0.mlp.down_proj.weight"))
    tensor[3, 5] += 1e-3
    deliver(transport_of(spoiled), [engine], config, 5)
    (line,) = checksum_differences(first.expected[0].result(), engine.client.checksums())
    assert name in line


@pytest.mark.parametrize("shared_engine", ["embedded"], indirect=True)
@pytest.mark.parametrize("kind", ["broadcast", "gathered"])
def test_the_next_bucket_is_gathered_while_one_is_sent(
    engine: Engine,
    model_b: Model,
    transport_of: Callable[..., BroadcastTransport],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The first one is sent only once the second has been asked for, whose memory it does not share."""
    second_asked_for = threading.Event()

    def before(number: int) -> None:
        if number == 1:
            second_asked_for.set()

    weights = model_b.weights()
    transport = transport_of(weights, before)
    if kind == "gathered":
        transport = GatheredTransport(exporter(weights, before))
    send, asked = transport._send, []

    def send_then(*arguments: Any) -> None:
        asked.append(second_asked_for.wait(30.0))
        send(*arguments)

    monkeypatch.setattr(transport, "_send", send_then)
    session = deliver(transport, [engine], model_b.hf.config.to_dict(), 3)
    assert asked == [True] * NUM_BUCKETS and session.failed == {}
    assert_serves(engine, model_b, session)


def test_outside_of_a_session_the_engine_refuses(
    engine: Engine, model_b: Model, transport_of: Callable[..., BroadcastTransport]
) -> None:
    before = engine.client.checksums()
    transport = transport_of(model_b.weights()[:2])
    feed = Feed(0, Replica(engine.server.url, engine.kind, 1, engine.server.key), (0,))
    session = SyncSession(
        [feed], {engine.server.url: engine.client}, {}, rank=0, policy_version=9, bucket_bytes=1, verify=True
    )
    session.call(feed, "begin", lambda client: None)
    transport.send(session)
    assert "must run between" in session.failed[0]
    assert transport.groups == {}, "a group whose members are at different places is no use"
    assert engine.client.checksums() == before


def start_on_ipv6(model: Model, tmp_path: Path) -> Engine:
    """An embedded server on the loopback address of IPv6; where the machine has none, of IPv4."""
    try:
        host, netloc = address_towards("http://[::1]:9"), "[::1]"
    except OSError:
        host = netloc = "127.0.0.1"

    def make(port: int) -> RolloutServer:
        launch = Launch(str(model.path), rollout_config("embedded"), "cpu", MAX_MODEL_LEN, host=host, port=port)
        command, env = ENGINES["embedded"].command(launch)
        return RolloutServer(command, env, f"http://{netloc}:{port}", tmp_path / "server.log", START_TIMEOUT_S)

    server = start_on_free_port(make, host)
    return Engine(
        "embedded", server, RolloutClient(server.url, "embedded", key=server.key, max_model_len=MAX_MODEL_LEN)
    )


@pytest.mark.parametrize("shared_engine", ["embedded", full("sglang")], indirect=True)
def test_a_server_that_is_lost_takes_no_other_with_it_and_its_successor_joins(
    start_engine: Callable[..., Engine],
    engine: Engine,
    model_a: Model,
    model_b: Model,
    transport_of: Callable[..., BroadcastTransport],
    tmp_path: Path,
) -> None:
    lost = start_engine("embedded", model_a.path)

    def kill(number: int) -> None:
        if number == 1:
            for pid in descendants(lost.server._supervisor.pid):
                os.kill(pid, signal.SIGKILL)

    config = model_a.hf.config.to_dict()
    transport = transport_of(model_b.weights(), kill)
    session = deliver(transport, [lost, engine], config, 6)
    assert list(session.failed) == [0] and lost.server.url in session.failed[0]
    assert_serves(engine, model_b, session, 1)
    assert list(transport.groups) == [1]

    transport.export = exporter(model_b.weights())
    successor = start_on_ipv6(model_a, tmp_path)
    session = deliver(transport, [successor, engine], config, 6)
    assert session.failed == {}
    for index, served in enumerate((successor, engine)):
        assert_serves(served, model_b, session, index)
    successor.server.stop()


def test_the_bytes_are_in_the_order_that_sglang_reads() -> None:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    named = in_sending_order([
        ("odd", torch.arange(3, dtype=torch.bfloat16)),
        ("wide", torch.arange(5, dtype=torch.float64)),
        ("matrix", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ])  # fmt: skip
    bucket = FlattenedTensorBucket(named_tensors=named)
    assert torch.equal(bucket.get_flattened_tensor(), pack_bytes(named))
    for (name, tensor), (wanted_name, wanted) in zip(bucket.reconstruct_tensors(), named, strict=True):
        assert name == wanted_name and torch.equal(tensor, wanted)


@pytest.mark.shows("sync", "serve", family="qwen3", server="shared_engine")
def test_a_model_on_disk_is_what_the_engine_serves(engine: Engine, model_b: Model, tmp_path: Path) -> None:
    """In two files, which need no session; a directory without weights changes nothing."""
    weights, directory = model_b.weights(), tmp_path / "weights"
    directory.mkdir()
    with pytest.raises(RolloutError):
        engine.client.update_weights_from_disk(str(directory), policy_version=2)
    for number, part in enumerate((weights[::2], weights[1::2])):
        save_file(dict(part), directory / f"model-0000{number + 1}-of-00002.safetensors", metadata={"format": "pt"})
    engine.client.update_weights_from_disk(str(directory), policy_version=2)
    expected = expected_checksums(weights, model_b.hf.config.to_dict(), 1, engine.kind)
    assert checksum_differences(expected, engine.client.checksums()) == []
    requests = [GenerateRequest(row, prompt, 1, GREEDY, [0]) for row, prompt in enumerate(PROMPTS)]
    for prompt, output in zip(PROMPTS, engine.generate(requests), strict=True):
        assert (output.output_ids, output.policy_version) == (model_b.greedy(prompt, GREEDY.max_new_tokens), 2)


def test_an_unknown_group_is_refused(engine: Engine) -> None:
    engine.client.begin_weight_update()
    with pytest.raises(RolloutError, match="nobody"):
        call = engine.client.engine.update_weights_from_group(
            [("x", "float32", [1])], group_name="nobody", policy_version=None
        )
        engine.client.ask(call)
    # Ends the session that is open.
    with pytest.raises(RolloutError, match="already open"):
        engine.client.begin_weight_update()
    engine.client._has_session = True
    engine.client.end_weight_update(0)
