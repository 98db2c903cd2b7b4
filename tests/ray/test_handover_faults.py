"""Servers that are lost while the trainer's devices change hands: each comes back with the weights that it missed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from remote_calls import RemoteCalls

from scalerl.batch import plan_step
from scalerl.cluster.batch import HeldRows, PlacedBatch
from scalerl.cluster.pools import ResourcePool
from scalerl.cluster.processes import Lease, Processes
from scalerl.cluster.worker_group import WorkerGroup
from scalerl.config import PPOConfig, compose
from scalerl.data import RLHFDataset, load_tokenizer
from scalerl.models import ModelShape
from scalerl.parallel.layout import Layout
from scalerl.rollout.sampling.groups import SampleGroup
from scalerl.rollout.sampling.policy_servers import PolicyServers
from scalerl.rollout.sampling.rollout import HybridRollout
from scalerl.rollout.servers.client import GenerateRequest, RolloutClient, RolloutError, SamplingParams
from scalerl.rollout.sync.handover import HandoverError, Point
from scalerl.rollout.sync.session import Step, SyncOrder
from scalerl.tracking.metrics import rollout_diff_metrics, to_floats
from scalerl.trainer.ranks.roles import MegatronActor
from scalerl.trainer.ranks.worker import MegatronWorker
from tests.e2e.graded_reward import server_of
from tests.lanes import mostly_full
from tests.ray.conftest import START_TIMEOUT_S
from tests.ray.workers import StrikingWorker
from tests.tiny_models import make_tiny_model

REWARD = Path(__file__).parents[1] / "e2e" / "graded_reward.py"
PROMPTS, SAMPLES = 4, 2
TIMEOUT_S = 120.0
GONE_TIMEOUT_S = 60.0
# What a server goes through from the start of a generation to that of the next.
HANDED_OVER: list[Step] = [
    "continue", "drain", "release_kv", "release_weights", "resume_weights", "begin", "bucket", "end", "check",
    "resume_kv",
]  # fmt: skip
SYNCED: list[Step] = ["begin", "bucket", "end", "check"]
EVERYTHING = "['cuda_graph', 'kv_cache', 'weights'] is released"
# Where a server is killed -> the last step that it was asked for.
STRIKES: dict[Point, Step] = {
    # It does not release its KV cache, and is not asked for the weights.
    "before_release": "release_kv",
    "after_release_kv": "release_weights",
    # Nobody asks it for anything until the trainer is done.
    "after_release": "resume_weights",
    "before_sync": "resume_weights",
    "after_sync": "resume_kv",
}


class RecordedOrder(SyncOrder):
    """Remembers the steps that it allowed."""

    def __init__(self, owner: str, *, serving: bool) -> None:
        super().__init__(owner, serving=serving)
        self.taken: list[Step] = []

    def advance(self, step: Step) -> None:
        super().advance(step)
        self.taken.append(step)


class HandingOver(PolicyServers):
    """Hands over as on a GPU: the servers hold no memory that would leave a CPU, but are bound to the same order."""

    _hands_over = True
    # Index of a server that was lost -> its order, as it was then.
    orders_of_lost: dict[int, SyncOrder]

    def _new_order(self, index: int) -> SyncOrder:
        if index in self.orders:
            self.orders_of_lost[index] = self.orders[index]
        return RecordedOrder(super()._new_order(index).owner, serving=False)


class Run:
    """A trainer on two ranks and two servers on its devices, as the training loop uses them."""

    def __init__(self, config: PPOConfig, pool: ResourcePool, workers: WorkerGroup, log_dir: Path) -> None:
        self.config, self.log_dir = config, log_dir
        policy = config.actor_rollout_ref
        tokenizer = load_tokenizer(policy.model.path)
        dataset = RLHFDataset(config.data.train_files, tokenizer, config.data)
        shape = ModelShape.from_hf(policy.model.path)
        self.servers = HandingOver(config, pool, shape, gpu_ids=None, log_dir=log_dir, single_node=True)
        self.servers.orders_of_lost = {}
        self.servers.start()
        self.rollout = HybridRollout(config, self.servers, {"train": dataset, "val": dataset}, tokenizer)
        workers.call(MegatronWorker.build_engine, "actor", policy.model.path, policy.actor.megatron, policy.actor.optim)
        self.rollout.wait_ready(workers)
        self.workers = workers
        workers.call(StrikingWorker.strike_at, None)
        self.actor = MegatronActor(workers, policy.actor, policy.rollout.temperature)
        self.num_generations = 0
        self.rollout.sync_weights(0)

    def generate(self) -> HeldRows:
        """Every sample once, by the weights that were synced last."""
        self.num_generations += 1
        groups = [SampleGroup(prompt, self.num_generations, prompt) for prompt in range(PROMPTS)]
        finished = self.rollout.finish(self.rollout.begin(groups))
        columns = finished.samples.samples
        keys = list(zip(columns["uid"].tolist(), columns["sample_index"].tolist(), strict=True))
        assert keys == [(group.uid, sample) for group in groups for sample in range(SAMPLES)]
        assert set(columns["policy_version"].tolist()) == {self.servers.policy_version}
        assert set(columns["response_length"].tolist()) == {self.config.data.max_response_length}
        assert not finished.unfinished
        return finished.samples

    def compare(self, samples: HeldRows) -> PlacedBatch:
        """Whichever server made a sample has the trainer's weights."""
        lengths = samples.num_tokens_S.tolist()
        plan = plan_step(lengths, dp_size=1, mini_batches=[range(len(lengths))], max_tokens_per_micro_batch=128)
        placed = self.rollout.place(samples, {"actor": plan})
        batch, metrics = self.actor.begin_logprobs(placed).add_to(placed)
        assert to_floats(rollout_diff_metrics(metrics))["training/rollout_probs_diff_max"] < 1e-4
        return batch

    def step(self, released: Callable[[], None] = lambda: None) -> None:
        """Generate, hand over, learn, hand back.  released: called when the servers have released their memory."""
        samples = self.generate()
        self.rollout.release_device()
        released()
        batch = self.compare(samples)
        advantages = np.where(np.arange(len(samples)) % 2, 1.0, -0.5).astype(np.float32)
        metrics = self.actor.update(batch.with_samples(advantages=advantages))
        assert metrics["actor/grad_norm"].value > 0
        self.rollout.sync_weights(self.servers.policy_version + 1)
        self.rollout.drop(samples)

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.servers.replicas]

    def client(self, index: int) -> RolloutClient:
        return self.servers.server_set.settings.client(self.servers.replicas[index])

    def checksums(self) -> list[list[dict[str, str]]]:
        """Of each server."""
        return [self.client(index).checksums() for index in range(len(self.urls))]

    def process_group(self, index: int) -> int:
        return server_of(str(self.log_dir / f"rollout-{index}."))

    def kill(self, index: int) -> None:
        """Returns when nobody answers there."""
        client = self.client(index)
        os.killpg(self.process_group(index), signal.SIGKILL)
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while asyncio.run(client.is_well()):
            assert time.monotonic() < deadline, f"{client.url} survives SIGKILL"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def run(
    processes: Processes, start_group: Callable[..., WorkerGroup], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("run")
    make_tiny_model(directory / "model", "qwen3", seed=0)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(PROMPTS)
    ]
    (directory / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    policy = "actor_rollout_ref"
    config = compose(
        "ppo",
        [
            "+recipe=[grpo,cpu]",
            "+layout=tp2",
            f"data.train_files={directory / 'data.jsonl'}",
            f"data.val_files={directory / 'data.jsonl'}",
            "data.max_prompt_length=48",
            "data.max_response_length=8",
            f"data.train_batch_size={PROMPTS}",
            f"{policy}.model.path={directory / 'model'}",
            f"{policy}.actor.use_kl_loss=false",
            f"{policy}.actor.optim.lr=1e-3",
            f"{policy}.actor.ppo_mini_batch_size={PROMPTS}",
            f"{policy}.rollout.name=embedded",
            f"{policy}.rollout.n={SAMPLES}",
            f"{policy}.rollout.num_replicas=2",
            f"{policy}.rollout.ignore_eos=true",
            f"{policy}.rollout.verify_weights_every=1",
            f"{policy}.rollout.max_num_seqs={SAMPLES}",
            f"{policy}.rollout.request_timeout_s={TIMEOUT_S}",
            f"custom_reward_function.path={REWARD}",
            f"trainer.timeout_s={2 * TIMEOUT_S}",
            f"trainer.default_local_dir={directory}",
        ],
    )
    layout = Layout.of(config.actor_rollout_ref.actor.megatron, 2)
    workers = start_group(StrikingWorker, layout, device="cpu", collective_timeout_s=TIMEOUT_S, seed=1)
    with Lease(processes) as lease:
        pool = lease.pool(nnodes=1, devices_per_node=2, device="cpu", timeout_s=START_TIMEOUT_S)
        run = Run(config, pool, workers, directory / "logs")
        lease.add(run.servers)
        lease.add(run.rollout)
        yield run


def assert_in_step(run: Run, before: list[list[dict[str, str]]]) -> None:
    """Both servers have the same weights, and not those of before; they generate."""
    first, second = run.checksums()
    assert first == second
    assert first[0].keys() == before[0][0].keys()
    changed = [name for name, checksum in first[0].items() if checksum != before[0][0][name]]
    assert len(changed) > len(first[0]) / 2, "the update changed nothing"
    samples = run.generate()
    run.compare(samples)
    run.rollout.drop(samples)


def test_servers_release_and_resume_in_order(run: Run) -> None:
    refusals: list[str] = []

    def ask_released() -> None:
        for index in range(len(run.urls)):
            with pytest.raises(RolloutError) as refused:
                generate_one(run.client(index))
            refusals.append(str(refused.value))

    before, urls = run.checksums(), run.urls
    for order in run.servers.orders.values():
        order.taken.clear()
    calls = RemoteCalls()
    with calls.counted():
        run.step(ask_released)
    # Of two ranks: log-probs, the update, the release of the servers' memory, and the sync.
    assert calls.by_actor()["RankProcess"] == {"untimed": 2 * 4}
    assert len(refusals) == 2 and all(EVERYTHING in refusal for refusal in refusals)
    assert [order.taken for order in run.servers.orders.values()] == [HANDED_OVER, HANDED_OVER]
    assert_in_step(run, before)
    assert run.urls == urls
    assert {name: metric.value for name, metric in run.rollout.faults().items()} == {
        "rollout/num_restarts": 0.0,
        "rollout/num_resubmitted": 0.0,
    }


def test_caches_leave_for_a_save_and_nothing_else_does(run: Run) -> None:
    before, urls = run.checksums(), run.urls
    for order in run.servers.orders.values():
        order.taken.clear()
    with run.rollout.lend_device():
        for index in range(2):
            with pytest.raises(RolloutError, match=r"\['kv_cache'\] is released"):
                generate_one(run.client(index))
    assert [order.taken for order in run.servers.orders.values()] == [["release_kv", "resume_kv"]] * 2
    assert run.checksums() == before and run.urls == urls
    assert {f"perf/handover/free_gb/{point}" for point in ("before_save", "after_save")} <= run.servers.metrics.keys()
    samples = run.generate()
    run.compare(samples)
    run.rollout.drop(samples)


def test_weights_leave_for_a_save_where_they_have_no_room_beside_it(run: Run) -> None:
    before, urls = run.checksums(), run.urls
    for order in run.servers.orders.values():
        order.taken.clear()
    run.workers.call(StrikingWorker.lack_at, "before_save")
    with run.rollout.lend_device():
        for index in range(2):
            with pytest.raises(RolloutError, match=re.escape(EVERYTHING)):
                generate_one(run.client(index))
    taken = ["release_kv", "release_weights", "resume_weights", "begin", "bucket", "end"]
    for order in run.servers.orders.values():
        assert [step for step in order.taken if step != "check"] == [*taken, "resume_kv"]
    # The embedded engine's memory stays as it was: that the weights were sent again, the steps say.
    assert run.checksums() == before and run.urls == urls
    assert "perf/handover/free_gb/before_save_alone" in run.servers.metrics
    run.workers.call(StrikingWorker.lack_at, "before_save", "before_save_alone")
    with pytest.raises(HandoverError, match="in this test"), run.rollout.lend_device():
        pytest.fail("the devices were lent")
    run.workers.call(StrikingWorker.lack_at)
    run.rollout.sync_weights(run.servers.policy_version)
    samples = run.generate()
    run.compare(samples)
    run.rollout.drop(samples)


@pytest.mark.full
def test_a_server_that_is_lost_during_a_save_comes_back_with_the_weights(run: Run) -> None:
    before, urls = run.checksums(), run.urls
    with run.rollout.lend_device():
        run.kill(1)
    assert run.urls[0] == urls[0] and run.urls[1] != urls[1]
    assert run.checksums() == before
    run.step()
    assert_in_step(run, before)
    assert run.rollout.faults()["rollout/num_restarts"].value == 1.0


def generate_one(client: RolloutClient) -> None:
    async def collect() -> None:
        async for _ in client.generate(GenerateRequest(0, [5, 6], 1, SamplingParams(1, temperature=0.0), [0])):
            pass

    asyncio.run(collect())


@pytest.mark.parametrize(
    ("point", "index"),
    mostly_full([(point, at % 2) for at, point in enumerate(STRIKES)], lambda case: case[0] == "after_release_kv"),
)
def test_a_server_that_is_lost_comes_back_with_the_weights(run: Run, point: Point, index: int) -> None:
    before, urls = run.checksums(), run.urls
    for order in run.servers.orders.values():
        order.taken.clear()
    run.workers.call(StrikingWorker.strike_at, point, index, run.process_group(index))
    run.step()
    # The one that is well goes through all of it; the lost one up to what it was asked last, and its successor has
    # released nothing.
    other = 1 - index
    assert run.servers.orders[other].taken == HANDED_OVER
    assert run.servers.orders_of_lost[index].taken == HANDED_OVER[: HANDED_OVER.index(STRIKES[point]) + 1]
    assert run.servers.orders[index].taken == SYNCED
    assert run.urls[other] == urls[other] and run.urls[index] != urls[index]
    assert_in_step(run, before)
    assert {name: metric.value for name, metric in run.rollout.faults().items()} == {
        "rollout/num_restarts": 1.0,
        "rollout/num_resubmitted": 0.0,
    }
