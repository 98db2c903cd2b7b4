"""Whatever the servers leave unfinished and the filter drops: every group is trained once, dropped for a reason, or in
flight, across resumes too; and none is older than it may be."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from scalerl.cluster.batch import HeldRows
from scalerl.config import PPOConfig
from scalerl.data import PromptCursor
from scalerl.rollout.sampling.groups import EarlyEnd, SampleGroup, kept_uids
from scalerl.rollout.sampling.rollout import Finished
from scalerl.trainer.ledger import ConservationError, Ledger
from scalerl.trainer.sample_stream import NoContrastError, SampleStream

N, NUM_PROMPTS = 2, 37


@dataclass
class Servers:
    """Keeps to the contract of `Rollout.begin` and `finish`; what is finished and how it scores is drawn."""

    rng: random.Random
    share_alike: float = 0.0
    version: int = 0
    batches: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    begun: list[list[SampleGroup]] = field(default_factory=list)
    # uid -> version under which an interrupted group began.
    interrupted: dict[int, int] = field(default_factory=dict)

    def begin(self, groups: list[SampleGroup], *, enough: EarlyEnd | None = None, carry: bool = False) -> Any:
        self.begun.append(list(groups))
        return list(groups), enough, carry, self.version

    def finish(self, generation: Any) -> Finished:
        groups, enough, carry, version = generation
        began = {group.uid: self.interrupted.pop(group.uid, version) for group in groups}
        scores = {group.uid: [0.0, float(self.rng.random() >= self.share_alike)] for group in groups}
        finished: list[SampleGroup] = []
        for group in self.rng.sample(groups, len(groups)):
            finished.append(group)
            kept = [g for g in finished if enough is None or enough.keep is None or scores[g.uid][1]]
            if enough is not None and len(kept) >= enough.num_groups:
                break
        whole = [group for group in groups if group in finished]
        unfinished = [group for group in groups if group not in finished]
        if carry:
            self.interrupted |= {group.uid: began[group.uid] for group in unfinished}
        samples = {
            "uid": np.repeat([group.uid for group in whole], N),
            "prompt_uid": np.repeat([group.prompt_uid for group in whole], N),
            "score": np.array([score for group in whole for score in scores[group.uid]]),
            "policy_version": np.repeat([began[group.uid] for group in whole], N),
            "reward_extra": np.array([{}] * (N * len(whole)), dtype=object),
            "reward_failed": np.zeros(N * len(whole), dtype=bool),
        }
        batch_id = len(self.batches)
        self.batches[batch_id] = samples
        return Finished(HeldRows(samples), {}, unfinished)

    def join(self, batches: list[tuple[HeldRows, list[int]]]) -> HeldRows:
        columns = {
            name: np.concatenate([held.samples[name][list(rows)] for held, rows in batches])
            for name in batches[0][0].samples
        }
        return HeldRows(columns)

    def forget(self, groups: list[SampleGroup]) -> None:
        for group in groups:
            self.interrupted.pop(group.uid, None)


def config(**sizes: Any) -> PPOConfig:
    cfg = PPOConfig()
    cfg.data.train_batch_size = 4
    cfg.data.gen_batch_size = sizes.get("gen", 4)
    cfg.trainer.max_staleness = sizes.get("staleness", 0)
    cfg.actor_rollout_ref.hybrid_engine = sizes.get("hybrid", True)
    cfg.actor_rollout_ref.rollout.partial_rollout = sizes.get("partial", False)
    cfg.algorithm.filter_groups.enable = sizes.get("filter", False)
    return cfg


MODES = {
    "synchronous": config(),
    "dynamic sampling": config(filter=True),
    "over-sampling": config(gen=7),
    "over-sampling and dynamic sampling": config(gen=7, filter=True),
    "partial rollouts": config(gen=7, staleness=2, partial=True),
    "partial rollouts and dynamic sampling": config(gen=6, staleness=1, partial=True, filter=True),
    "one step off": config(staleness=1, hybrid=False),
    "three steps ahead": config(staleness=3, hybrid=False, partial=True, filter=True),
}
TOTAL = 12


def stream_of(cfg: PPOConfig, servers: Servers) -> SampleStream:
    return SampleStream(cfg, servers, PromptCursor(NUM_PROMPTS, 0, True), total_steps=TOTAL)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_conservation_and_the_bound_over_crashes(mode: str, seed: int) -> None:
    cfg, rng = MODES[mode], random.Random(seed)
    servers = Servers(rng, share_alike=0.4 if cfg.algorithm.filter_groups.enable else 0.0)
    stream = stream_of(cfg, servers)
    trained: list[int] = []
    saved = None
    step, crashes = 1, 0
    while step <= TOTAL:
        samples, metrics = stream.next_batch(step)
        columns = samples.samples
        uids = list(dict.fromkeys(columns["uid"].tolist()))
        assert len(uids) == cfg.data.train_batch_size and len(columns["uid"]) == N * len(uids)
        staleness = step - 1 - columns["policy_version"]
        assert staleness.min() >= 0 and staleness.max() <= cfg.trainer.max_staleness
        assert metrics["training/staleness/max"].value == staleness.max()
        if cfg.algorithm.filter_groups.enable:
            assert kept_uids(columns, stream.keep) == uids
        stream.trained()
        trained += uids
        servers.version = step
        # Over JSON, as in a checkpoint.
        state = json.loads(json.dumps([stream.prompts.state_dict(), stream.state_dict()]))
        if rng.random() < 0.3:
            saved = step, state, list(trained)
        if saved and crashes < 3 and rng.random() < 0.3:
            step, (prompts, own), trained = saved[0], saved[1], list(saved[2])
            crashes += 1
            servers = Servers(rng, servers.share_alike, version=step)
            stream = stream_of(cfg, servers)
            stream.prompts.load_state_dict(prompts)
            stream.load_state_dict(own)
        step += 1
    totals = stream.ledger.totals()
    assert totals["trained"] == len(trained) == len(set(trained)) == TOTAL * cfg.data.train_batch_size
    assert totals["submitted"] == sum(n for name, n in totals.items() if name != "submitted")
    # Every prompt that was taken belongs to a group that was submitted, and none was taken twice for two groups.
    assert totals["submitted"] == stream.prompts.num_taken
    if not cfg.actor_rollout_ref.rollout.partial_rollout:
        assert totals["in_flight"] == 0


def test_ahead_means_that_the_next_steps_are_asked_for_before_this_one_is_there() -> None:
    servers = Servers(random.Random(0))
    stream = stream_of(config(staleness=2, hybrid=False), servers)
    stream.next_batch(1)
    assert [{group.step for group in groups} for groups in servers.begun] == [{1}, {2}, {3}]
    stream.trained()
    stream.next_batch(2)
    assert [{group.step for group in groups} for groups in servers.begun][3:] == [{4}]


def test_what_is_in_flight_is_asked_for_again_after_a_resume() -> None:
    cfg = config(staleness=1, hybrid=False)
    servers = Servers(random.Random(0))
    stream = stream_of(cfg, servers)
    stream.next_batch(1)
    stream.trained()
    resumed = stream_of(cfg, Servers(random.Random(1), version=1))
    resumed.prompts.load_state_dict(stream.prompts.state_dict())
    resumed.load_state_dict(stream.state_dict())
    resumed.next_batch(2)
    # The same prompts with the same seeds.
    assert resumed.rollout.begun[0] == servers.begun[1]
    assert resumed.ledger.submitted == 3 * 4


def test_a_batch_is_refilled_by_about_as_many_as_it_takes() -> None:
    servers = Servers(random.Random(3), share_alike=0.5)
    stream = stream_of(config(filter=True), servers)
    for step in range(1, TOTAL + 1):
        stream.next_batch(step)
        stream.trained()
    sizes = [len(groups) for groups in servers.begun]
    assert max(sizes) == 4 and min(sizes) < 4
    assert stream.ledger.dropped["no_contrast"] > 0 and stream.ledger.dropped["unfinished"] == 0
    positions = [group.uid for groups in servers.begun for group in groups]
    assert len(positions) == len(set(positions))


def test_prompts_that_teach_nothing_end_the_run_with_the_keys_to_change() -> None:
    cfg = replace(config(filter=True))
    cfg.algorithm.filter_groups.max_num_gen_batches = 3
    stream = stream_of(cfg, Servers(random.Random(0), share_alike=1.1))
    with pytest.raises(NoContrastError, match=r"after 3 rounds .*max_num_gen_batches.* no group .* differ in score"):
        stream.next_batch(1)


def test_few_groups_that_differ_are_filled_up_and_the_run_goes_on() -> None:
    cfg = replace(config(filter=True))
    cfg.algorithm.filter_groups.max_num_gen_batches = 2
    stream = stream_of(cfg, Servers(random.Random(1), share_alike=0.6))
    num_filled = 0
    for step in range(1, TOTAL + 1):
        samples, metrics = stream.next_batch(step)
        uids = list(dict.fromkeys(samples.samples["uid"].tolist()))
        differ = kept_uids(samples.samples, stream.keep)
        assert len(uids) == 4 and metrics["training/filled_groups"].value == 4 - len(differ)
        # Nobody who differs is left out for one who does not.
        asked = [group.uid for groups in stream.rollout.begun for group in groups if group.step == step]
        batches = [batch for batch in stream.rollout.batches.values() if set(batch["uid"].tolist()) <= set(asked)]
        assert sum(len(kept_uids(batch, stream.keep)) for batch in batches) == len(differ)
        stream.trained()
        num_filled += 4 - len(differ)
    totals = stream.ledger.totals()
    assert num_filled > 0 and totals["trained"] == 4 * TOTAL
    assert totals["submitted"] == totals["trained"] + totals["dropped/no_contrast"]


def test_a_lost_group_is_noticed() -> None:
    ledger = Ledger()
    ledger.submit(3)
    ledger.train(1)
    ledger.drop("stale", 1)
    ledger.check(1)
    with pytest.raises(
        ConservationError, match=r"3 groups submitted, 1 trained, dropped .*stale.*: 1 should be in flight, 2"
    ):
        ledger.check(2)
