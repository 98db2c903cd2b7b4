"""What the engines say of themselves; a third one needs nothing but its file and its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerl.config.schema import MULTI_NODE_NAMES, ROLLOUT_NAMES, RolloutConfig
from scalerl.config.schema.devices import DevicesConfig
from scalerl.servers.checksums import AsSent, ExpectedChecksums
from scalerl.servers.client import RolloutClient
from scalerl.servers.engines import ENGINES, Command, Engine, Launch
from scalerl.servers.host import ServerSettings
from scalerl.servers.purpose import POLICY
from scalerl.servers.requests import GenerateRequest, SamplingParams
from scalerl.servers.weights import Bucket, expected_checksums, serialize_bucket
from scalerl.servers.wire import slots_of

REQUEST = GenerateRequest("p", [5, 6], 2, SamplingParams(max_new_tokens=4), seeds=[7, 8])


def test_the_configuration_knows_their_names() -> None:
    assert set(ROLLOUT_NAMES) == set(ENGINES)
    assert all(engine.name == name for name, engine in ENGINES.items())


def test_sglang_computes_the_prompt_of_equal_samples_once() -> None:
    body = ENGINES["sglang"].generate_body(REQUEST, slots_of(REQUEST, 100))
    assert (body["input_ids"], body["sampling_params"]["n"]) == ([5, 6], 2)
    assert body["sampling_params"]["skip_special_tokens"] is False and "sampling_seed" not in body["sampling_params"]


def test_the_embedded_engine_draws_each_sample_from_its_own_seed() -> None:
    body = ENGINES["embedded"].generate_body(REQUEST, slots_of(REQUEST, 100))
    assert body["input_ids"] == [[5, 6], [5, 6]]
    assert [sampling["sampling_seed"] for sampling in body["sampling_params"]] == [7, 8]
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        unseeded = GenerateRequest("p", [5, 6], 1, SamplingParams(max_new_tokens=4))
        ENGINES["embedded"].generate_body(unseeded, slots_of(unseeded, 100))


def test_ranks_of_a_server() -> None:
    assert (ENGINES["sglang"].num_ranks(4), ENGINES["embedded"].num_ranks(4)) == (4, 1)
    assert {name for name, engine in ENGINES.items() if engine.num_ranks(4) > 1} == set(MULTI_NODE_NAMES)


def test_each_process_has_a_log_of_each_start() -> None:
    first = ServerSettings(Launch("/m", RolloutConfig(), "cpu", 64, nnodes=2), POLICY, False)
    second = replace(first, launch=replace(first.launch, node_rank=1))
    assert [each.log_path("/logs", 3, 0).name for each in (first, second)] == ["rollout-3.log", "rollout-3.node-1.log"]
    assert second.log_path("/logs", 3, 2) == Path("/logs/rollout-3.node-1.restart-2.log")


class Third(Engine):
    name = "third"

    def command(self, launch: Launch) -> Command:
        return [sys.executable, "-m", "third", "--port", str(launch.port), "--model", launch.model_path], {"A": "1"}

    def num_ranks(self, tp_size: int) -> int:
        return tp_size

    def serialize(self, bucket: Bucket) -> str:
        return ",".join(name for name, _ in bucket.named)

    def expected_checksums(
        self, model_config: Mapping[str, Any], tp_size: int, dtype: torch.dtype | None = None
    ) -> ExpectedChecksums:
        return ExpectedChecksums(AsSent(), dtype)


def test_a_third_engine_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started, asked, fed and proven by the code of all engines."""
    monkeypatch.setitem(ENGINES, Third.name, Third())
    launch = Launch("/model", RolloutConfig(name="third"), "cpu", 64)
    command, env = ServerSettings(launch, POLICY, True).command(host="127.0.0.1", port=9, seed=0, gpu_ids=None)
    assert command[1:] == ["-m", "third", "--port", "9", "--model", "/model"] and env == {"A": "1"}
    client = RolloutClient("http://127.0.0.1:9", "third", key="", max_model_len=64)
    body = client.engine.generate_body(REQUEST, slots_of(REQUEST, 64))
    assert len(body["sampling_params"]) == 2 and client.engine.update_fields("flattened_bucket") == {}
    weights = [("a", torch.ones(2)), ("b", torch.zeros(3))]
    assert serialize_bucket(weights, "third") == "a,b"
    (rank,) = expected_checksums(weights, {}, 1, "third")
    assert rank.keys() == {"a", "b"}


@pytest.mark.parametrize(("device", "configured", "limit_s"), [
    ("cpu", None, 600.0), ("cuda", None, 1500.0), ("cuda", 40.0, 40.0),
])  # fmt: skip
def test_a_start_on_a_gpu_may_take_longer(device: str, configured: float | None, limit_s: float) -> None:
    launch = Launch("/m", RolloutConfig(start_timeout_s=configured), device, 64)
    assert ServerSettings(launch, POLICY, True).start_timeout_s == limit_s
    assert limit_s < DevicesConfig().timeout_s, "else the run ends first, and no log is shown"
