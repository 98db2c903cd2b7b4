"""Trainer ranks on every layout feed a real SGLang server and an embedded one: the servers serve what was trained."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from scalerl.batch import plan_step
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.batch import PlacedBatch
from scalerl.cluster.failures import WorkerError
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config.schema import ActorConfig, MegatronConfig, OptimConfig
from scalerl.parallel.layout import Layout
from scalerl.rollout.servers.client import GenerateRequest, Replica, RolloutClient, SamplingParams
from scalerl.rollout.servers.process import RolloutServer, start_on_free_port
from scalerl.rollout.sync.session import plan_leads
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.roles import TOKENS, MegatronActor
from scalerl.trainer.ranks.worker import MegatronWorker
from tests.ray.workers import SyncingWorker
from tests.sglang.conftest import MAX_MODEL_LEN, PROMPTS, Engine, Model, make_model, make_server

KINDS = ("sglang", "embedded")
# Each with its own learning rate, so that each ends with other weights.
LAYOUTS = {
    "tp2": (Layout(2, 2, 1), 1e-2),
    "tp2_pp2": (Layout(4, 2, 2), 2e-2),
    "dp2": (Layout(2, 1, 1), 3e-2),
}
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
# So small that a sync takes several buckets.
BUCKET_BYTES = 100_000
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.load(make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=0))


@pytest.fixture(scope="module")
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


def build(group: WorkerGroup, model: Model, servers: dict[str, Future[RolloutServer]], lr: float) -> WorkerGroup:
    group.call(
        MegatronWorker.build_engine, "actor", str(model.path), MegatronConfig(dtype="float32"), OptimConfig(lr=lr)
    )
    connect(group, model, replicas_of(servers))
    return group


def connect(group: WorkerGroup, model: Model, replicas: list[Replica], **transport: str) -> None:
    group.call(
        RLWorker.connect_rollout,
        replicas,
        json.loads((model.path / "config.json").read_text()),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        model_path=str(model.path),
        **transport,
    )


@pytest.fixture(scope="module", params=LAYOUTS)
def trainer(
    request: pytest.FixtureRequest,
    model: Model,
    servers: dict[str, Future[RolloutServer]],
    start_group: Callable[..., WorkerGroup],
) -> Iterator[WorkerGroup]:
    layout, lr = LAYOUTS[request.param]
    group = start_group(SyncingWorker, layout, device="cpu", collective_timeout_s=TIMEOUT_S, seed=1)
    yield build(group, model, servers, lr)
    start_group.stop(group)


@pytest.fixture(scope="module")
def lone_trainer(
    model: Model, servers: dict[str, Future[RolloutServer]], start_group: Callable[..., WorkerGroup]
) -> WorkerGroup:
    """One rank: no other waits for it when a sync fails."""
    group = start_group(SyncingWorker, Layout(1), device="cpu", collective_timeout_s=TIMEOUT_S, seed=1)
    return build(group, model, servers, 1e-2)


def client_of(kind: str, server: RolloutServer) -> RolloutClient:
    return RolloutClient(server.url, kind, key=server.key, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def engines(servers: dict[str, Future[RolloutServer]]) -> dict[str, Engine]:
    return {kind: Engine(kind, server.result(), client_of(kind, server.result())) for kind, server in servers.items()}


def train(group: WorkerGroup) -> None:
    """One step on four random samples: log-probs, then an update with advantages of both signs."""
    generator = torch.Generator().manual_seed(5)
    lengths = [12, 7, 20, 9]
    ids = [torch.randint(3, 480, (length,), generator=generator) for length in lengths]
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
        "num_sampled_tokens": np.array(lengths) - 3,
        "advantages": np.array([1.0, -1.0, 0.5, -0.5], dtype=np.float32),
    }
    shards = [ray.put(shard(dp_rank)) for dp_rank in range(dp_size)]
    batch = PlacedBatch(samples, {"actor": plan}).with_column(TOKENS, "actor", shards)
    actor = MegatronActor(group, ActorConfig(), temperature=1.0)
    batch, _ = actor.begin_logprobs(batch).add_to(batch)
    metrics = actor.update(batch)
    assert metrics["actor/grad_norm"].value > 0


def greedy(engine: Engine) -> list[tuple[list[int], int]]:
    """(tokens, policy version) per prompt."""
    requests = [GenerateRequest(i, prompt, 1, GREEDY, [0]) for i, prompt in enumerate(PROMPTS)]
    return [(output.output_ids, output.policy_version) for output in engine.generate(requests)]


def replicas_of(servers: dict[str, Future[RolloutServer]]) -> list[Replica]:
    started = {kind: servers[kind].result() for kind in KINDS}
    return [Replica(server.url, kind, 1, server.key) for kind, server in started.items()]


@pytest.mark.shows("sync", family="qwen3", layout="trainer")
@pytest.mark.shows("serve", family="qwen3", layout="sglang")
@pytest.mark.shows("serve", family="qwen3", layout="embedded")
@pytest.mark.parametrize("transport", ["shared", "broadcast", "disk"])
def test_servers_serve_what_was_trained(
    trainer: WorkerGroup,
    engines: dict[str, Engine],
    servers: dict[str, Future[RolloutServer]],
    model: Model,
    tmp_path: Path,
    transport: str,
) -> None:
    directory = {"directory": str(tmp_path / "weights")} if transport == "disk" else {}
    connect(trainer, model, replicas_of(servers), transport=transport, **directory)
    before = [greedy(engines[kind]) for kind in KINDS]
    train(trainer)
    (weights, *others) = trainer.call(SyncingWorker.exported)
    assert not any(others)
    parts = trainer.call(RLWorker.sync_weights, 7, verify=True)
    # Every rank takes part; of a broadcast those that send to a server, and no others, have the model.
    num_bytes, world_size = sum(array.nbytes for array in weights.values()), trainer.layout.world_size
    senders = plan_leads(len(KINDS), world_size) if transport == "broadcast" else range(world_size)
    assert [part.num_bytes for part in parts] == [num_bytes * (rank in senders) for rank in range(world_size)]
    assert parts[0].num_buckets > 1
    hf = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    hf.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    trained = Model(model.path, hf)
    expected = [(trained.greedy(prompt, GREEDY.max_new_tokens), 7) for prompt in PROMPTS]
    for kind, old in zip(KINDS, before, strict=True):
        assert [tokens for tokens, _ in old] != [tokens for tokens, _ in expected], "the update changed nothing"
        # The servers cached these prompts with the weights of before.
        assert greedy(engines[kind]) == expected, kind


# 483 rows of the vocabulary are padded on either side; qwen2 has them once, as its first and its last layer. By name:
# the family, its sizes and the quantization of the server; each rank of that in fp8 has whole blocks.
WIDE_MODELS: dict[str, tuple[str, dict[str, int], str | None]] = {
    "qwen2": ("qwen2", {"vocab_size": 483, "ffn_size": 80}, None),
    "qwen3_moe": ("qwen3_moe", {"vocab_size": 483, "moe_intermediate_size": 48}, None),
    "qwen3_moe in fp8": (
        "qwen3_moe",
        {"vocab_size": 483, "hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256},
        "fp8",
    ),
}
# As LAYOUTS.
WIDE_LAYOUTS = {
    "tp2": (Layout(2, 2), 1e-2),
    "tp2_ep2_etp1": (Layout(2, 2, ep_size=2, etp_size=1), 1e-2),
    "ep2": (Layout(2, 1, ep_size=2, etp_size=1), 2e-2),
}


@dataclass(frozen=True)
class WideServer:
    """An SGLang server on two ranks, starting while a trainer does."""

    model: Model
    starting: Future[RolloutServer]
    quantization: str | None

    @property
    def engine(self) -> Engine:
        server = self.starting.result()
        return Engine("sglang", server, client_of("sglang", server))


@pytest.fixture(scope="module")
def wide_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WideServer]:
    """request.param: of WIDE_MODELS."""
    path = tmp_path_factory.mktemp("wide")
    family, sizes, quantization = WIDE_MODELS[request.param]
    model = Model.load(make_model(path / "model", family, seed=0, **sizes))
    synced = {"synced": True, "quantization": quantization} if quantization else {}
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(
            start_on_free_port,
            lambda port: make_server("sglang", model.path, path / "server.log", port, tp_size=2, **synced),
        )
        yield WideServer(model, starting, quantization)
        if starting.exception() is None:
            starting.result().stop()


@pytest.fixture(scope="module")
def wide_trainer(
    request: pytest.FixtureRequest, wide_server: WideServer, start_group: Callable[..., WorkerGroup]
) -> Iterator[WorkerGroup]:
    """Two ranks. request.param: of WIDE_LAYOUTS."""
    layout, lr = WIDE_LAYOUTS[request.param]
    group = start_group(SyncingWorker, layout, device="cpu", collective_timeout_s=TIMEOUT_S, seed=1)
    group.call(
        MegatronWorker.build_engine,
        "actor",
        str(wide_server.model.path),
        MegatronConfig(dtype="float32", expert_tensor_parallel_size=layout.etp_size),
        OptimConfig(lr=lr),
    )
    yield group
    start_group.stop(group)


@pytest.mark.shows("sync", family="wide_server", layout="wide_trainer")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="SGLang on CPU binds each rank to a core of its own")
@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared", "broadcast", "disk"])
# Apart from the transports: in one table with them every case would start a server of its own.
@pytest.mark.parametrize(
    ("wide_server", "wide_trainer"),
    [("qwen2", "tp2"), ("qwen3_moe", "tp2_ep2_etp1"), ("qwen3_moe", "ep2"), ("qwen3_moe in fp8", "tp2_ep2_etp1")],
    indirect=True,
)
def test_two_ranks_feed_a_server_on_two(
    wide_server: WideServer, wide_trainer: WorkerGroup, tmp_path: Path, transport: str
) -> None:
    """The checksums are those of every parameter on either rank of the server."""
    engine = wide_server.engine
    directory = {"directory": str(tmp_path / "weights")} if transport == "disk" else {}
    replica = Replica(engine.server.url, "sglang", 2, engine.server.key, quantization=wide_server.quantization)
    connect(wide_trainer, wide_server.model, [replica], transport=transport, **directory)
    before = engine.client.checksums()
    train(wide_trainer)
    wide_trainer.call(RLWorker.sync_weights, 8, verify=True)
    after = engine.client.checksums()
    for rank in range(2):
        changed = [name for name, checksum in after[rank].items() if checksum != before[rank][name]]
        assert len(changed) > len(after[rank]) / 2, "the update changed nothing"
    assert {version for _, version in greedy(engine)} == {8}


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_bucket_is_named(
    lone_trainer: WorkerGroup, servers: dict[str, Future[RolloutServer]], kind: str
) -> None:
    """The first bucket, the embedding alone, does not reach one of the servers."""
    lone_trainer.call(SyncingWorker.lose_bucket, None, kind)
    lone_trainer.call(RLWorker.sync_weights, 1, verify=True)
    train(lone_trainer)
    lone_trainer.call(SyncingWorker.lose_bucket, 1, kind)
    # Without the proof the loss goes by unseen.
    lone_trainer.call(RLWorker.sync_weights, 2, verify=False)
    with pytest.raises(WorkerError, match="1 tensors differ") as error:
        lone_trainer.call(RLWorker.sync_weights, 3, verify=True)
    assert f"{servers[kind].result().url} does not serve policy version 3" in str(error.value)
    assert "model.embed_tokens.weight: trainer " in str(error.value)
