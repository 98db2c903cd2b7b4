"""SGLang on two ranks: fused and cut parameters, a padded vocabulary, tied embeddings and biases."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scalerl.rollout.servers.checksums import checksum_differences
from scalerl.rollout.servers.client import GenerateRequest, RolloutError, SamplingParams
from scalerl.rollout.servers.supervise import descendants
from tests.served_weights import expected_checksums
from tests.sglang.conftest import PROMPTS, Engine, Model, make_model

# 483 rows are padded to 512: 256 on rank 0, 227 and 29 of zeros on rank 1.
VOCAB_SIZE = 483
# Padded to 128: 64 on rank 0, 16 and 48 of zeros on rank 1.
FFN_SIZE = 80

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own"
)


def make(path: Path, family: str, seed: int) -> Model:
    return Model.load(make_model(path, family, seed=seed, vocab_size=VOCAB_SIZE, ffn_size=FFN_SIZE))


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def old(family: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("old"), family, seed=0)


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Engine], old: Model) -> Iterator[Engine]:
    engine = start_engine("sglang", old.path, tp_size=2)
    yield engine
    engine.server.stop()


# The first is that of the last test.
@pytest.mark.shows("sync", "serve", layout="sglang tp2")
@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "glm4", "seed_oss", "smollm3"], indirect=True)
def test_update_and_checksums_with_two_ranks(engine: Engine, old: Model, tmp_path: Path, family: str) -> None:
    new = make(tmp_path / "new", family, seed=1)
    config = old.hf.config.to_dict()
    assert checksum_differences(expected_checksums(old.weights(), config, 2, "sglang"), engine.client.checksums()) == []

    engine.load(new.weights(), policy_version=5, tp_size=2)

    expected = expected_checksums(new.weights(), config, 2, "sglang")
    assert expected[0] != expected[1]
    assert checksum_differences(expected, engine.client.checksums()) == []
    requests = [GenerateRequest(row, p, 1, SamplingParams(12, temperature=0.0)) for row, p in enumerate(PROMPTS)]
    for prompt, output in zip(PROMPTS, engine.generate(requests), strict=True):
        assert output.output_ids == new.greedy(prompt, 12)
        expected_logprobs = new.logprobs(prompt, output.output_ids, 1.0)
        torch.testing.assert_close(torch.tensor(output.logprobs), expected_logprobs, atol=1e-4, rtol=0)
        assert output.policy_version == 5


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_a_crashed_rank_ends_the_server_and_not_its_owner(engine: Engine) -> None:
    """SGLang then kills its own process tree and signals its parent; the owner only sees that the server is gone.

    The last test of this server.
    """
    schedulers = [pid for pid in descendants(os.getpid()) if b"sglang::scheduler_TP" in command_line(pid)]
    assert len(schedulers) == 2
    os.kill(schedulers[1], signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while engine.server.alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert engine.server.exit_code() not in (None, 0)
    assert not any(b"sglang::scheduler_TP" in command_line(pid) for pid in descendants(os.getpid()))
    with pytest.raises(RolloutError, match="went away"):
        engine.generate([GenerateRequest("p", [5], 1, SamplingParams(4))])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
