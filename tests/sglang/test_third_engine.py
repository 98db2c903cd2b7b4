"""An engine with a protocol of its own is started, asked, fed, proven and ended by the code of all engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scalerl.config.schema import RolloutConfig
from scalerl.config.servers import ROLLOUT_ENGINES, EngineTraits
from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.buckets import Bucket
from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import (
    ClientSettings,
    GenerateOutput,
    GenerateRequest,
    Replica,
    RolloutClient,
    RolloutError,
    SamplingParams,
)
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.host import ServerHost
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.server_set import continue_generation, pause, small_caches
from scalerl.rollout.sync.session import SyncSession, feeds_of
from scalerl.rollout.sync.transports.memory import load_bucket
from tests.served_weights import expected_checksums
from tests.sglang.third_engine import VOCAB, ThirdEngine

REQUESTS = [
    GenerateRequest("a", [5, 6], 2, SamplingParams(max_new_tokens=40), seeds=[1, 2]),
    GenerateRequest("b", [9], 1, SamplingParams(max_new_tokens=7), seeds=[3]),
]
CLIENTS = ClientSettings(POLICY, max_model_len=64, timeout_s=60.0, max_concurrency=256)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ServerHost]:
    """Without Ray, which a host needs to be on another node alone."""
    monkeypatch.setitem(ROLLOUT_ENGINES, ThirdEngine.name, EngineTraits(repeats_draws=True))
    monkeypatch.setitem(ENGINES, ThirdEngine.name, ThirdEngine())
    launch = Launch("/model", RolloutConfig(name="third", start_timeout_s=60.0), "cpu", CLIENTS.max_model_len)
    host = ServerHost(0, launch, POLICY, single_node=True, log_dir=str(tmp_path))
    yield host
    host.stop()


@pytest.fixture
def replica(host: ServerHost) -> Replica:
    url, key = host.start()
    return Replica(url, ThirdEngine.name, 1, key)


@pytest.fixture
def client(replica: Replica) -> RolloutClient:
    return CLIENTS.client(replica)


def ask(client: RolloutClient) -> list[GenerateOutput]:
    return asyncio.run(generate_samples([client], REQUESTS))


def counted(first: int, step: int, count: int) -> list[int]:
    return [(first + step * place) % VOCAB for place in range(1, count + 1)]


def test_it_is_asked(client: RolloutClient) -> None:
    outputs = ask(client)
    assert [output.key for output in outputs] == [("a", 0), ("a", 1), ("b", 0)]
    assert [output.output_ids for output in outputs] == [counted(6, 1, 40), counted(6, 1, 40), counted(9, 1, 7)]
    assert {(output.finish_reason, output.policy_version) for output in outputs} == {("length", 0)}
    # A prompt of full length gets no token; the version is the server's.
    full = GenerateRequest("full", [1] * 64, 1, SamplingParams(4), [0])
    (output,) = asyncio.run(generate_samples([client], [full]))
    assert (output.output_ids, output.finish_reason, output.policy_version) == ([], "length", 0)


def test_it_is_fed_and_proven(client: RolloutClient, replica: Replica) -> None:
    weights = [("step", torch.tensor([3], dtype=torch.uint8)), ("spare", torch.arange(4.0))]
    (feed,) = feeds_of("shared", [replica], 1)
    session = SyncSession(
        [feed], {replica.url: client}, {}, rank=0, policy_version=7, bucket_bytes=1, verify=False
    )  # fmt: skip
    session.call(feed, "begin", RolloutClient.begin_weight_update)
    for tensor in weights:
        load_bucket(session, feed, Bucket([tensor]))
    session.call(feed, "end", lambda client: client.end_weight_update(7))
    served = session.call(feed, "check", RolloutClient.checksums)
    assert session.failed == {}
    assert checksum_differences(expected_checksums(weights, {}, 1, ThirdEngine.name), served) == []
    wrong = [*weights[:1], ("spare", torch.zeros(4))]
    assert checksum_differences(expected_checksums(wrong, {}, 1, ThirdEngine.name), served)
    (first, *_) = ask(client)
    assert (first.output_ids, first.policy_version) == (counted(6, 3, 40), 7)


def test_samples_go_on_where_they_were_interrupted(client: RolloutClient, replica: Replica) -> None:
    whole = ask(client)
    # The short one comes first; of the others one is half done, and one has not begun.
    expected = {("a", 0): [4], ("a", 1): [0, 4], ("b", 0): [0]}
    # On a loaded machine the interruption may come when more is done.
    for _ in range(5):
        client.set_policy_version(0)
        outputs = interrupted_at_the_first(client)
        assert [output.output_ids for output in outputs] == [output.output_ids for output in whole]
        versions = {output.key: [version for _, version in output.version_spans] for output in outputs}
        if versions == expected:
            return
    pytest.fail(f"{versions}, not {expected}")


def interrupted_at_the_first(client: RolloutClient) -> list[GenerateOutput]:
    """All samples; when the first has come the server is paused, and goes on as version 4."""
    failed: list[dict[int, str]] = []

    def interrupt() -> None:
        failed.append(pause({0: client}))
        client.set_policy_version(4)
        failed.append(continue_generation({0: client}))

    interrupting = threading.Thread(target=interrupt)

    def at_the_first(output: GenerateOutput) -> None:
        if not interrupting.ident:
            interrupting.start()

    outputs = asyncio.run(generate_samples([client], REQUESTS, at_the_first))
    interrupting.join()
    assert failed == [{}, {}]
    return outputs


def test_what_ends_early_comes_back_with_what_it_has(client: RolloutClient) -> None:
    came: list[object] = []
    outputs = asyncio.run(
        generate_samples([client], REQUESTS, lambda o: came.append(o.request_id), stop_when=lambda: "b" in came)
    )
    reasons = {output.key: output.finish_reason for output in outputs}
    assert reasons[("b", 0)] == "length" and reasons[("a", 0)] == "abort"


def test_it_gives_its_device_back(client: RolloutClient, replica: Replica) -> None:
    tags = client.engine.memory_tags
    client.release(tags["kv_cache"])
    client.release(tags["weights"])
    with pytest.raises(RolloutError, match=r"/v3/complete refused request '[a-z]': asleep: \['counter', 'table'\]"):
        ask(client)
    client.resume(tags["weights"])
    client.resume(tags["kv_cache"])
    assert len(ask(client)) == 3


def test_its_cache_is_measured_in_its_blocks(client: RolloutClient, replica: Replica) -> None:
    clients = {0: client}
    # It has 48 tokens: three blocks of 16.
    assert list(small_caches(clients, 63)) == []
    (said,) = small_caches(clients, 64)
    assert said.startswith(
        f"rollout server 0 ({client.url}) has a KV cache of 48 tokens, not the 64 of the memory plan"
    )
    assert list(small_caches(clients, None)) == []


def test_its_refusals_are_told_in_its_words(client: RolloutClient, replica: Replica) -> None:
    blob = ENGINES[ThirdEngine.name].serialize(Bucket([("other", torch.zeros(1))]))
    with pytest.raises(RolloutError, match=r"/v3/put failed: no tensor \['other'\]"):
        client.update_weights([blob])
    stranger = CLIENTS.client(Replica(replica.url, ThirdEngine.name, 1, "another key"))
    with pytest.raises(RolloutError, match=r"/v3/sums refused \(HTTP 422\): the key is wrong"):
        stranger.checksums()


def test_it_forgets_a_run_and_is_started_again(client: RolloutClient, host: ServerHost) -> None:
    client.set_policy_version(9)
    host.leave()
    assert ask(client)[0].policy_version == 0
    assert asyncio.run(client.is_well())
    assert "was still running and was killed" in host.end()
    assert not asyncio.run(client.is_well())
    url, key = host.start()
    assert key != client.key and len(ask(CLIENTS.client(Replica(url, ThirdEngine.name, 1, key)))) == 3
