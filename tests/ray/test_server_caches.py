"""SGLang servers of a run have the KV cache that the run gives them, also after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalerl.cluster.processes import Lease, Processes
from scalerl.config.schema import ModelConfig
from scalerl.rollout.servers.client import ClientSettings
from scalerl.rollout.servers.process import ServerStartError
from scalerl.rollout.servers.purpose import POLICY
from scalerl.rollout.servers.server_set import ServerSet
from tests.sglang.conftest import MAX_MODEL_LEN, make_model, rollout_config

TIMEOUT_S = 240.0
TOKENS = 2048


@pytest.fixture
def servers(cluster: Processes, tmp_path: Path) -> Iterator[ServerSet]:
    model = make_model(tmp_path / "model", "qwen3", seed=0)
    with Lease(cluster) as lease:
        pool = lease.pool(nnodes=1, devices_per_node=1, device="cpu", timeout_s=TIMEOUT_S)
        yield lease.add(
            ServerSet(
                ClientSettings(POLICY, MAX_MODEL_LEN, TIMEOUT_S, max_concurrency=1),
                pool,
                ModelConfig(path=str(model)),
                replace(rollout_config("sglang"), kv_cache_tokens=TOKENS),
                gpu_ids=None,
                log_dir=tmp_path / "servers",
                timeout_s=TIMEOUT_S,
                single_node=True,
            )
        )


def cache_tokens(servers: ServerSet) -> int:
    size = servers.clients[0].cache_size()
    assert size is not None
    return size[0]


@pytest.mark.full
def test_a_server_has_the_cache_it_was_given_and_a_smaller_one_is_noticed(
    servers: ServerSet, caplog: pytest.LogCaptureFixture
) -> None:
    servers.start()
    servers.wait_ready()
    assert cache_tokens(servers) == TOKENS

    # As it looks where the device has less room than the plan says.
    servers.config = replace(servers.config, kv_cache_tokens=2 * TOKENS)
    said = rf"rollout server 0 .* has a KV cache of {TOKENS} tokens, not the {2 * TOKENS}.*kv_cache_tokens={TOKENS}$"
    with pytest.raises(ServerStartError, match=said):
        servers.wait_ready()

    servers.end({0: "the test ends it"})
    with caplog.at_level(logging.WARNING):
        servers.restart_down()
    assert cache_tokens(servers) == TOKENS
    assert [record.message for record in caplog.records if "KV cache" in record.message]
