"""Trainer ranks on every layout feed a real SGLang server and an embedded one: the servers serve what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from scalerl.balance import plan_step
from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig
from scalerl.controller.batch import PlacedBatch
from scalerl.controller.trainer_roles import TOKENS, MegatronActor
from scalerl.controller.worker_group import WorkerError, WorkerGroup
from scalerl.hybrid.replicas import Replica
from scalerl.parallel.layout import Layout
from scalerl.protocol import DataProto, Jagged
from scalerl.rollout.client import GenerateRequest, RolloutClient, SamplingParams
from scalerl.rollout.server import RolloutServer, start_on_free_port
from tests.ray.workers import SyncingWorker
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model, make_model, make_server

KINDS = ("sglang", "embedded")
# Each with its own learning rate, so that each ends with other weights.
LAYOUTS = {"tp2": (Layout(2, 2, 1), 1e-2), "pp2": (Layout(2, 1, 2), 2e-2), "dp2": (Layout(2, 1, 1), 3e-2)}
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
# So small that a sync takes several buckets.
BUCKET_BYTES = 100_000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0))


@pytest.fixture(scope="session")
def servers(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[RolloutServer]]]:
    """Both kinds, starting while the first trainer does."""
    logs = tmp_path_factory.mktemp("servers")
    with ThreadPoolExecutor(len(KINDS)) as threads:
        starting = {
            kind: threads.submit(
                start_on_free_port,
                lambda port, kind=kind: make_server(kind, model.path, logs / f"{kind}.log", port),
            )
            for kind in KINDS
        }
        yield starting
        for future in starting.values():
            if future.exception() is None:
                future.result().stop()


def connect(group: WorkerGroup, model: Model, servers: dict[str, Future[RolloutServer]], lr: float) -> WorkerGroup:
    group.build_engine("actor", str(model.path), MegatronConfig(dtype="float32"), OptimConfig(lr=lr))
    group.connect_rollout(
        [Replica(servers[kind].result().url, kind, 1) for kind in KINDS],
        json.loads((model.path / "config.json").read_text()),
        bucket_bytes=BUCKET_BYTES,
        max_model_len=MAX_MODEL_LEN,
        timeout_s=60.0,
    )
    return group


@pytest.fixture(scope="module", params=LAYOUTS)
def trainer(
    request: pytest.FixtureRequest,
    model: Model,
    servers: dict[str, Future[RolloutServer]],
    start_group: Callable[..., WorkerGroup],
) -> Iterator[WorkerGroup]:
    layout, lr = LAYOUTS[request.param]
    group = start_group(SyncingWorker, layout, device="cpu", collective_timeout_s=60.0, seed=1)
    yield connect(group, model, servers, lr)
    start_group.stop(group)


@pytest.fixture(scope="module")
def lone_trainer(
    model: Model, servers: dict[str, Future[RolloutServer]], start_group: Callable[..., WorkerGroup]
) -> WorkerGroup:
    """One rank: no other waits for it when a sync fails."""
    group = start_group(SyncingWorker, Layout(1), device="cpu", collective_timeout_s=60.0, seed=1)
    return connect(group, model, servers, 1e-2)


@pytest.fixture
def engines(servers: dict[str, Future[RolloutServer]]) -> dict[str, Engine]:
    return {
        kind: Engine(kind, server.result(), RolloutClient(server.result().url, kind, max_model_len=MAX_MODEL_LEN))
        for kind, server in servers.items()
    }


def train(group: WorkerGroup) -> None:
    """One step on four random samples: log-probs, then an update with advantages of both signs."""
    generator = torch.Generator().manual_seed(5)
    lengths = [12, 7, 20, 9]
    ids = [torch.randint(3, 500, (length,), generator=generator) for length in lengths]
    dp_size = group.layout.dp_size
    plan = plan_step(lengths, dp_size=dp_size, mini_batches=[range(4)], max_tokens_per_micro_batch=32)

    def shard(dp_rank: int) -> DataProto:
        rows = plan.rows(dp_rank)
        return DataProto(
            {
                "input_ids": Jagged.from_list([ids[row] for row in rows], torch.int64),
                "response_mask": Jagged.from_list([torch.arange(lengths[row]) >= 3 for row in rows], torch.bool),
            }
        )

    samples = {
        "prompt_length": np.full(4, 3),
        "response_length": np.array(lengths) - 3,
        "advantages": np.array([1.0, -1.0, 0.5, -0.5], dtype=np.float32),
    }
    shards = [ray.put(shard(dp_rank)) for dp_rank in range(dp_size)]
    batch = PlacedBatch(samples, {"actor": plan}).with_column(TOKENS, "actor", shards)
    actor = MegatronActor(group, ActorConfig(), temperature=1.0)
    batch, _ = actor.logprobs(batch)
    metrics = actor.update(batch)
    assert metrics["actor/grad_norm"].value > 0


def greedy(engine: Engine) -> list[tuple[list[int], int]]:
    """(tokens, policy version) per prompt."""
    requests = [GenerateRequest(i, prompt, 1, GREEDY, [0]) for i, prompt in enumerate(PROMPTS)]
    return [(output.output_ids, output.policy_version) for output in engine.generate(requests)]


def test_servers_serve_what_was_trained(trainer: WorkerGroup, engines: dict[str, Engine], model: Model) -> None:
    train(trainer)
    (weights, *others) = trainer.exported()
    assert not any(others)
    parts = trainer.sync_weights(7, verify=True)
    # Every rank takes part, and each sees the whole model pass.
    assert [part["num_bytes"] for part in parts] == [sum(array.nbytes for array in weights.values())] * 2
    hf = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    hf.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    trained = Model(model.path, hf)
    expected = [trained.greedy(prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
    assert expected != [model.greedy(prompt, GREEDY.max_new_tokens) for prompt in PROMPTS], "the update changed nothing"
    for kind in KINDS:
        # The servers cached these prompts with the weights of the layout before.
        assert greedy(engines[kind]) == [(tokens, 7) for tokens in expected], kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_bucket_is_named(
    lone_trainer: WorkerGroup, servers: dict[str, Future[RolloutServer]], kind: str
) -> None:
    """The first bucket, the embedding alone, does not reach one of the servers."""
    lone_trainer.lose_bucket(None, kind)
    lone_trainer.sync_weights(1, verify=True)
    train(lone_trainer)
    lone_trainer.lose_bucket(1, kind)
    # Without the proof the loss goes by unseen.
    lone_trainer.sync_weights(2, verify=False)
    with pytest.raises(WorkerError, match="1 tensors differ") as error:
        lone_trainer.sync_weights(3, verify=True)
    assert f"{servers[kind].result().url} does not serve policy version 3" in str(error.value)
    assert "model.embed_tokens.weight: trainer " in str(error.value)
