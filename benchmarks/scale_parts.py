"""Parts of benchmarks/controller_scale.py: actors that answer at once, and a run of the product's parts over them."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from scalerl.base.stop import StopRequest
from scalerl.batch import StepPlan
from scalerl.batch.data_proto import DataProto, Jagged
from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.cluster.dispatch import Dispatch, MicroBatches, RankProcess, Result, Worker, register
from scalerl.cluster.pools import ActorSpec, PooledActor, ResourcePool
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import PPOConfig, compose
from scalerl.data import PromptCursor
from scalerl.models.flops import FlopsShape
from scalerl.parallel.layout import Layout
from scalerl.rollout.sampling.groups import SampleGroup
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.rollout.sampling.rollout_workers import RolloutWorkers, default_num_workers, share_servers
from scalerl.rollout.sampling.worker import GeneratedBatch, RolloutWorker
from scalerl.rollout.servers.client import Replica
from scalerl.rollout.sync.handover import DeviceMemory, RankMemory
from scalerl.rollout.sync.session import RankReport, SyncOrder
from scalerl.tracking.metrics import Metric, Timers
from scalerl.trainer.planners import PackingRules, Planner
from scalerl.trainer.ppo import Run
from scalerl.trainer.ranks.rl_worker import RLWorker
from scalerl.trainer.ranks.roles import MegatronActor, MegatronCritic, MegatronReference
from scalerl.trainer.sample_stream import SampleStream
from scalerl.trainer.saving.saves import Saves
from scalerl.trainer.step_metrics import MfuBasis, StepOutcome, step_metrics

GROUP = 16
RANKS_OF_A_SERVER = 8
MAX_PROMPT, MAX_RESPONSE = 512, 8192
MAX_TOKENS = 16384
# What a rank says of the token of each sample whose two log-probs differ most.
WORST = {
    "difference": np.float32,
    "position": np.int64,
    "token_id": np.int64,
    "rollout_logprob": np.float32,
    "old_logprob": np.float32,
}
UPDATES = 4
# As many as a rank of a run reports of a pass.
NUM_METRICS = 24
# Qwen2.5-1.5B
SHAPE = FlopsShape(
    num_layers=28, hidden_size=1536, num_heads=12, num_kv_heads=2, head_dim=128, ffn_hidden_size=8960, vocab_size=151936
)


def handover_metrics() -> dict[str, Metric]:
    """The metrics of a rank's memory in a sync."""
    memory = DeviceMemory(lambda: RankMemory(0, "cpu", 2**36, 2**37, 2**30))
    memory.record("before_sync")
    memory.record("after_sync")
    return memory.metrics()


HANDOVER_METRICS = handover_metrics()


class InstantRank(Worker):
    """In the place of many `RLWorker`s: of every num_processes-th rank, which it is in turn."""

    # Weight version -> how many of these ranks have had it.
    synced: tuple[int, int] = (-1, 0)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return metrics_of("mismatch"), token_columns(micro_batches, "old_logprobs")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return {}, token_columns(micro_batches, "ref_logprobs")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return {}, token_columns(micro_batches, "values")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_advantages(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return metrics_of("advantages"), token_columns(micro_batches, "advantages", "returns")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return metrics_of("actor"), None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        return metrics_of("critic"), None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def find_worst_tokens(self, shard: DataProto, micro_batches: MicroBatches, **kwargs: Any) -> Result:
        count = num_rows(micro_batches)
        return {}, DataProto(samples={name: np.zeros(count, dtype) for name, dtype in WORST.items()})

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        pass

    @register(Dispatch.ONE_TO_ALL)
    def memory(self) -> dict[str, Metric]:
        return {f"perf/{name}": Metric(1.0, "max") for name in ("a", "b", "c", "d")}

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(
        self, version: int, *, orders: Mapping[int, SyncOrder], with_memory: bool, **kwargs: Any
    ) -> RankReport:
        turn = self.synced[1] if self.synced[0] == version else 0
        self.synced = version, turn + 1
        server, place = divmod(self.rank + turn * self.layout.world_size, RANKS_OF_A_SERVER)
        led = {server: orders[server]} if place == 0 else {}
        for order in led.values():
            for step in ("begin", "bucket", "end"):
                order.advance(step)
        metrics = HANDOVER_METRICS | (self.memory() if with_memory else {})
        return RankReport({}, led, {"send": 1.0}, metrics, num_bytes=1, num_buckets=1, bucket_bytes=1)


def metrics_of(role: str) -> dict[str, Metric]:
    return {f"{role}/{number}": Metric(1.0, "mean", 2.0) for number in range(NUM_METRICS)}


def token_columns(micro_batches: MicroBatches, *names: str) -> DataProto:
    """Of rows without tokens."""
    bounds = torch.zeros(num_rows(micro_batches) + 1, dtype=torch.int64)
    return DataProto(dict.fromkeys(names, Jagged(torch.zeros(0), bounds)))


def num_rows(micro_batches: MicroBatches) -> int:
    """Of a rank: what it gets of tokens is empty here."""
    return sum(len(rows) for mini_batch in micro_batches for rows in mini_batch)


def seconds_of_empty_calls(run: Run, calls: Mapping[str, int]) -> float:
    """Processor seconds of the driver for as many calls of the ranks' actors in as many phases, without any work.

    calls: phase -> calls to ranks in it.
    """
    ranks = run.worker_groups[0].ranks
    began = time.process_time()
    for count in calls.values():
        ray.get([ranks[number % len(ranks)].run.remote("nothing") for number in range(count)])
    return time.process_time() - began


class InstantRolloutWorker:
    """In the place of `RolloutWorker`: the sample columns of a generation, without the samples."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    async def generate(self, dataset: str, groups: Sequence[SampleGroup], n: int, *args: Any, **kwargs: Any) -> Any:
        return GeneratedBatch(0, sample_columns(groups, n, self.generator), 0.0, 0, [], [])

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def next_lost(self) -> None:
        import asyncio

        await asyncio.Event().wait()

    async def select(self, wanted: Sequence[tuple[int, Sequence[int]]], **kwargs: Any) -> DataProto | list[DataProto]:
        return DataProto() if len(wanted) == 1 else [DataProto() for _ in wanted]

    async def regroup(self, groups: Sequence[Sequence[int]], *columns: DataProto) -> DataProto | list[DataProto]:
        return DataProto() if len(groups) == 1 else [DataProto() for _ in groups]

    async def dump(self, *args: Any) -> None:
        pass

    async def drop(self, batch_id: int) -> None:
        pass

    async def in_service(self, indices: Sequence[int]) -> None:
        pass


def sample_columns(groups: Sequence[SampleGroup], n: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """The columns that `RolloutWorker` makes."""
    count = len(groups) * n
    responses = generator.lognormal(7, 1, count).clip(1, MAX_RESPONSE).astype(np.int64)
    numbers = {
        "uid": np.repeat([group.uid for group in groups], n),
        "prompt_uid": np.repeat([group.prompt_uid for group in groups], n),
        "sample_index": np.tile(np.arange(n), len(groups)),
        "seed": generator.integers(0, 2**62, count),
        "prompt_length": np.repeat(generator.integers(50, MAX_PROMPT, len(groups)), n),
        "prompt_length_before": np.repeat(generator.integers(50, MAX_PROMPT, len(groups)), n),
        "response_length": responses,
        "num_sampled_tokens": responses.copy(),
        "num_turns": np.ones(count, dtype=np.int64),
        "score": generator.random(count),
        "reward_failed": np.zeros(count, dtype=bool),
        "reward_penalty": np.zeros(count),
        "policy_version": np.zeros(count, dtype=np.int64),
    }
    # No value is the object of another that it is not in a run: pickle writes an object once, then that it was there.
    objects: dict[str, list[Any]] = {
        "finish_reason": [own("stop") for _ in range(count)],
        "reward_error": [""] * count,
        "reward_extra": [{own("acc"): float(score)} for score in generator.random(count)],
    }
    # Samples of a group have their prompt's.
    for name, text in {"data_source": "openai/gsm8k", "reward_style": "rule"}.items():
        objects[name] = [of_prompt for _ in groups for of_prompt in itertools.repeat(own(text), n)]
    for name, values in objects.items():
        numbers[name] = np.empty(count, dtype=object)
        numbers[name][:] = values
    return numbers


def own(text: str) -> str:
    """An equal text that is an object of its own, as one that another process sent is."""
    return text.encode().decode()


class GroupOnFewActors(WorkerGroup):
    """A group of many ranks on a few actors."""

    def __init__(self, layout: Layout, actors: Sequence[Any]) -> None:
        self.cls, self.layout = RLWorker, layout
        self.timeout_s, self.limits = 600.0, {}
        self.ranks = [actors[rank % len(actors)] for rank in range(layout.world_size)]


def make_run(
    options: argparse.Namespace,
    dp_size: int,
    pool: ResourcePool,
    *,
    dump_dir: Path | None,
    on_phase: Callable[[str], None],
) -> Run:
    """dump_dir: where a step's samples are dumped, if they are.  on_phase: is told of each phase of a step as it
    begins."""
    num_samples = dp_size * options.samples_per_rank
    config = configuration(options, dp_size, num_samples, dump_dir)
    rank, worker = ray.remote(RankProcess), ray.remote(InstantRolloutWorker)
    place = pool.place(0, num_devices=1)
    actors = [
        rank.options(**place).remote(InstantRank, number, Layout(options.processes))
        for number in range(options.processes)
    ]
    group = GroupOnFewActors(Layout(dp_size * options.tp, tp_size=options.tp), actors)
    # The driver does not know that its ranks are answered for by the same processes.
    critic_group = GroupOnFewActors(Layout(critic_ranks(options, dp_size), tp_size=options.tp), actors)
    groups = {"actor": group} | ({"critic": critic_group} if options.critic else {})
    elsewhere = pool.place(0, num_devices=0)
    workers = [
        worker.options(**elsewhere, max_concurrency=64).remote(options.seed + number)
        for number in range(options.rollout_workers or default_num_workers(_num_servers(group)))
    ]
    rollout = make_rollout(config, pool, group, workers)
    # As a run has it: on the actor's ranks, and by the actor's plan.
    planned = groups | ({"ref": group} if config.actor_rollout_ref.actor.use_kl_loss else {})
    actor = config.actor_rollout_ref.actor
    update = actor.ppo_mini_batch_size * GROUP
    planners = {
        role: Planner(
            PackingRules.of(
                ranks.layout,
                max_tokens_per_micro_batch=actor.max_tokens_per_micro_batch,
                sequence_parallel=actor.megatron.sequence_parallel,
            ),
            update,
            SHAPE,
        )
        for role, ranks in planned.items()
    }
    return Run(
        config=config,
        samples=SampleStream(config, rollout, PromptCursor(10**6, 1, True), total_steps=10**6),
        rollout=rollout,
        actor=MegatronActor(group, actor, 1.0),
        reference=MegatronReference(group, 1.0) if "ref" in planned else None,
        critic=MegatronCritic(critic_group, config.critic) if options.critic else None,
        reward_model=None,
        kl=None,
        worker_groups=list(groups.values()),
        planners=planners,
        mfu_bases={role: MfuBasis(SHAPE, 1e15, ranks.world_size) for role, ranks in groups.items()},
        tracker=SimpleNamespace(log=lambda *args, **kwargs: None),  # type: ignore[arg-type]
        timers=Timers(on_enter=on_phase),
        total_steps=10**6,
        stop=StopRequest(),
        saves=Saves(config.trainer),
    )


def seconds_of_place(run: Run) -> tuple[float, float]:
    """Wall and processor seconds of the last step's `place`."""
    assert isinstance(run.rollout, TimedRollout)
    return run.rollout.place_s[-1]


def critic_ranks(options: argparse.Namespace, dp_size: int) -> int:
    """Ranks of the critic's pool: half of the actor's."""
    return max(1, dp_size // 2) * options.tp


def _num_servers(group: WorkerGroup) -> int:
    return max(1, group.world_size // RANKS_OF_A_SERVER)


class TimedRollout(HybridRollout):
    """A rollout that notes the seconds of each `place`, the half of a step's balance that follows the plan: (wall,
    processor)."""

    place_s: list[tuple[float, float]]

    def place(self, samples: HeldRows, plans: Mapping[str, StepPlan]) -> PlacedBatch:
        began = time.monotonic(), time.process_time()
        batch = super().place(samples, plans)
        self.place_s.append((time.monotonic() - began[0], time.process_time() - began[1]))
        return batch


def make_rollout(config: PPOConfig, pool: ResourcePool, group: WorkerGroup, workers: Sequence[Any]) -> TimedRollout:
    """With servers that nobody starts: one for every RANKS_OF_A_SERVER ranks."""
    servers = PolicyServers.__new__(PolicyServers)
    servers.config, servers.pool, servers.rollout = config, pool, config.actor_rollout_ref.rollout
    servers.timeout_s, servers.num_syncs, servers.policy_version = 600.0, 0, 0
    servers.metrics, servers.workers, servers.routing = {}, group, None
    count = _num_servers(group)
    replicas = [Replica(f"http://server-{index}", "sglang", RANKS_OF_A_SERVER, "") for index in range(count)]
    server_set: Any = SimpleNamespace(replicas=replicas, down={}, num_restarts=0, end_lost=bool, end_failed=bool)
    servers.server_set = server_set
    servers.orders = {index: SyncOrder(replica.url, serving=False) for index, replica in enumerate(replicas)}
    rollout = TimedRollout.__new__(TimedRollout)
    rollout.place_s = []
    rollout.config, rollout.servers, rollout.judge, rollout.rollout = config, servers, None, servers.rollout
    rollout.timeout_s, rollout.running, rollout.val_uids = 600.0, [], []
    rollout.num_restarts = rollout.num_judge_restarts = rollout.num_resubmitted = 0
    rollout.said, rollout.spans = set(), []
    processes = [
        PooledActor(worker, worker.__ray_ready__.remote(), ActorSpec(RolloutWorker, 0, 0)) for worker in workers
    ]
    rollout.numbers = itertools.count()
    shares = share_servers(count, len(workers))
    rollout.workers = servers.rollout_workers = RolloutWorkers(processes, shares, 600.0)
    rollout.workers.wait_ready()
    rollout.workers.connect(replicas, None, 0)  # type: ignore[arg-type]
    # The servers started from files; the first step finds them with the trainer's weights.
    rollout.sync_weights(policy_version=0)
    return rollout


def configuration(
    options: argparse.Namespace, dp_size: int, num_samples: int, dump_dir: Path | None = None
) -> PPOConfig:
    rollout = "actor_rollout_ref.rollout"
    critic = [
        "+recipe=ppo",
        "critic.resource_pool.nnodes=1",
        f"critic.resource_pool.n_gpus_per_node={critic_ranks(options, dp_size)}",
        f"critic.megatron.tensor_model_parallel_size={options.tp}",
    ]
    arguments = [
        *(critic if options.critic else ["+recipe=grpo"]),
        *([] if dump_dir is None else [f"trainer.rollout_data_dir={dump_dir}"]),
        "data.train_files=none.parquet",
        "data.val_files=none.parquet",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_RESPONSE}",
        f"data.train_batch_size={num_samples // GROUP}",
        "actor_rollout_ref.model.path=none",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_samples // GROUP // UPDATES}",
        f"actor_rollout_ref.actor.max_tokens_per_micro_batch={MAX_TOKENS}",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={options.tp}",
        f"{rollout}.n={GROUP}",
        f"trainer.n_gpus_per_node={dp_size * options.tp}",
        "trainer.device=cpu",
        "trainer.default_local_dir=none",
    ]
    return compose("ppo", arguments, rules=False)


def log(run: Run, outcome: StepOutcome, step: int, timing_s: Mapping[str, float]) -> dict[str, float]:
    return step_metrics(run.config, outcome, run.mfu_bases, timing_s, step=step, epoch=0)
