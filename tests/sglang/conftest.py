"""One SGLang server and one embedded server for the whole session, on the same tiny model."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from scalerl.config import compose
from scalerl.config.schema import RolloutConfig
from scalerl.models.adapters import Adapter
from scalerl.rollout.dispatcher import generate_samples
from scalerl.rollout.servers.client import GenerateOutput, GenerateRequest, RolloutClient, SamplingParams
from scalerl.rollout.servers.connection import authorization, new_key
from scalerl.rollout.servers.engines import ENGINES, Launch
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from tests.folders import is_last_of_its_folder
from tests.served_weights import serialize_bucket
from tests.tiny_models import EOS_ID, make_tiny_model

MAX_MODEL_LEN = 96
# Other than SGLang's own.
MAX_PREFILL_TOKENS = 3072
START_TIMEOUT_S = 240.0
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
PROMPTS = [[5, 6, 7, 8], [100, 41, 300], [9, 200, 33, 44, 55, 66, 77, 88, 99, 110], [3], [450, 12, 7, 7, 7, 19]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


def rollout_config(kind: str, tp_size: int = 1) -> RolloutConfig:
    """With verl's key of the tokens of a prefill, as a run reads it."""
    rollout = "actor_rollout_ref.rollout"
    needed = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", f"{rollout}.n=2"]
    cfg = compose("ppo", [*needed, f"{rollout}.max_num_batched_tokens={MAX_PREFILL_TOKENS}"])
    own = {"name": kind, "dtype": "float32", "max_num_seqs": 16, "tensor_model_parallel_size": tp_size}
    return replace(cfg.actor_rollout_ref.rollout, **own)


def make_server(
    kind: str,
    model_path: Path,
    log_path: Path,
    port: int,
    tp_size: int = 1,
    synced: bool = False,
    quantization: str | None = None,
    adapter: Adapter | None = None,
    **own: Any,
) -> RolloutServer:
    """own: the engine's own arguments (`engine_kwargs`)."""
    config = replace(rollout_config(kind, tp_size), quantization=quantization)
    kwargs = config.engine_kwargs
    config = replace(config, engine_kwargs=kwargs | {kind: kwargs.get(kind, {}) | own})
    launch = Launch(str(model_path), config, "cpu", MAX_MODEL_LEN, port=port, synced=synced, adapter=adapter)
    command, env = ENGINES[kind].command(launch)
    # One in 64 keys begins with a dash, which a parser of arguments takes for the next option.
    key = f"-{new_key()}"
    return RolloutServer(command, env, f"http://127.0.0.1:{port}", log_path, START_TIMEOUT_S, key=key)


def server_info(client: RolloutClient) -> dict[str, Any]:
    """What a server of SGLang's protocol says of itself; its fields differ between engines."""
    request = urllib.request.Request(f"{client.url}/server_info", headers=authorization(client.key))
    with urllib.request.urlopen(request, timeout=60.0) as response:
        return json.loads(response.read())


def make_model(path: Path, family: str, seed: int, **arguments: object) -> Path:
    """A tiny model whose end-of-text token is likely enough to end some samples and not others."""
    make_tiny_model(path, family, seed=seed, **arguments)
    tensors = load_file(path / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[head][EOS_ID] *= 2.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@dataclass
class Model:
    """A model on disk, with transformers as the oracle for it."""

    path: Path
    hf: PreTrainedModel

    @classmethod
    def load(cls, path: Path) -> Model:
        return cls(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())

    def weights(self) -> list[tuple[str, Tensor]]:
        return sorted(load_file(self.path / "model.safetensors").items())

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[len(ids), V]: one forward over everything, no cache."""
        return self.hf(torch.tensor([ids])).logits[0].float()

    def greedy(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        ids = list(prompt)
        while len(ids) - len(prompt) < max_new_tokens:
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] == EOS_ID:
                break
        return ids[len(prompt) :]

    def logprobs(self, prompt: list[int], output_ids: list[int], temperature: float) -> Tensor:
        """[len(output_ids)]"""
        logits = self.logits(prompt + output_ids)[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(output_ids)[:, None])[:, 0]


@dataclass
class Engine:
    kind: str
    server: RolloutServer
    client: RolloutClient

    def generate(self, requests: list[GenerateRequest]) -> list[GenerateOutput]:
        return asyncio.run(generate_samples([self.client], requests))

    def load(self, weights: list[tuple[str, Tensor]], policy_version: int, tp_size: int = 1) -> None:
        """A whole update session in three buckets."""
        third = -(-len(weights) // 3)
        buckets = [weights[first : first + third] for first in range(0, len(weights), third)]
        self.client.begin_weight_update()
        for bucket in buckets:
            blobs = [serialize_bucket(bucket, self.kind) for _ in range(tp_size)]
            self.client.update_weights(blobs)
        self.client.end_weight_update(policy_version)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_model(tmp_path_factory.mktemp("model_a"), "qwen3", seed=0))


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_model(tmp_path_factory.mktemp("model_b"), "qwen3", seed=1))


_started: list[RolloutServer] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if is_last_of_its_folder(item, nextitem):
        while _started:
            _started.pop().stop()


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """They end with the last test of this folder."""

    def start(kind: str, model_path: Path, tp_size: int = 1, synced: bool = False, **own: Any) -> Engine:
        log_path = tmp_path_factory.mktemp("log") / f"{kind}.log"
        server = start_on_free_port(lambda port: make_server(kind, model_path, log_path, port, tp_size, synced, **own))
        _started.append(server)
        client = RolloutClient(
            server.url, kind, key=server.key, max_model_len=MAX_MODEL_LEN, timeout_s=120.0, max_concurrency=16
        )
        return Engine(kind, server, client)

    return start


@pytest.fixture(scope="session", params=["embedded", "sglang"])
def shared_engine(
    request: pytest.FixtureRequest, start_engine: Callable[..., Engine], model_a: Model
) -> Iterator[Engine]:
    engine = start_engine(request.param, model_a.path)
    yield engine
    engine.server.stop()


@pytest.fixture
def engine(shared_engine: Engine, model_a: Model) -> Iterator[Engine]:
    """The session's server, with model A in it before and after the test."""
    yield shared_engine
    if shared_engine.generate([GenerateRequest("version", [5], 1, ONE_TOKEN, [0])])[0].policy_version != 0:
        shared_engine.load(model_a.weights(), policy_version=0)
