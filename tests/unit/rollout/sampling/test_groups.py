"""Which groups are kept, and what a generation that may end early knows of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.config import compose
from scalerl.data import PromptRow
from scalerl.rewards import ScoreResult
from scalerl.rewards.manager_variants import overlong_penalty
from scalerl.rollout.program import Sample, Trajectory
from scalerl.rollout.sampling.groups import EarlyEnd, GroupFilter, GroupScores, SampleGroup, kept_uids
from scalerl.rollout.sampling.sample_columns import to_batch


def samples_of(
    uids: list[int], scores: list[float], extras: list[dict] | None = None, failed: list[bool] | None = None
) -> dict[str, np.ndarray]:
    column = np.empty(len(uids), dtype=object)
    column[:] = extras or [{}] * len(uids)
    samples = {"uid": np.array(uids), "score": np.array(scores), "reward_extra": column}
    return samples | {"reward_failed": np.array(failed or [False] * len(uids))}


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_a_uid_is_one_groups_alone(step: int, position: int, other_step: int, other_position: int) -> None:
    uid = SampleGroup(3, step, position).uid
    assert 0 <= uid < 2**63 and SampleGroup.step_and_position(uid) == (step, position)
    same = (step, position) == (other_step, other_position)
    assert (uid == SampleGroup(5, other_step, other_position).uid) == same
    assert SampleGroup(*SampleGroup(3, step, position).as_list()) == SampleGroup(3, step, position)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, -1.0])), max_size=24))
def test_groups_whose_samples_differ_are_kept_wherever_their_rows_are(rows: list[tuple[int, float]]) -> None:
    samples = samples_of([uid for uid, _ in rows], [score for _, score in rows])
    expected = [
        uid
        for uid in dict.fromkeys(uid for uid, _ in rows)
        if len({score for other, score in rows if other == uid}) > 1
    ]
    assert kept_uids(samples, GroupFilter("score")) == expected
    assert kept_uids(samples, None) == list(dict.fromkeys(uid for uid, _ in rows))


def test_the_metric_may_be_one_that_the_reward_function_returned() -> None:
    extras = [{"acc": True}, {"acc": True}, {"acc": 1}, {"acc": 0}]
    samples = samples_of([1, 1, 2, 2], [0.0, 1.0, 1.0, 1.0], extras)
    assert kept_uids(samples, GroupFilter("score")) == [1]
    assert kept_uids(samples, GroupFilter("acc")) == [2]
    with pytest.raises(
        ValueError, match=r"filter_groups.metric = acc: the reward function returned None.*\['format'\]"
    ):
        kept_uids(samples_of([1, 1], [0.0, 1.0], [{"format": 1}] * 2), GroupFilter("acc"))


@pytest.mark.parametrize("metric", ["score", "acc"])
def test_a_failed_sample_makes_no_contrast(metric: str) -> None:
    """It has a 0 for a score, and no number beside it."""
    wrong, right = {"acc": False}, {"acc": True}
    uids, scores = [1, 1, 1, 2, 2, 2, 3, 3], [-1.0, 0.0, -1.0, 0.0, 1.0, -1.0, 0.0, 0.0]
    failed = [False, True, False, True, False, False, True, True]
    samples = samples_of(uids, scores, [wrong, {}, wrong, {}, right, wrong, {}, {}], failed)
    assert kept_uids(samples, GroupFilter(metric)) == [2]


def sample_of(uid: int, index: int, *agents: str) -> Sample:
    return Sample(uid, index, [Trajectory(uid, index, [1], 8, agent=agent) for agent in agents or [""]])


@pytest.mark.parametrize(("of_white", "is_kept"), [(0.0, False), (-1.0, True)])
def test_agents_are_compared_with_their_own(of_white: float, is_kept: bool) -> None:
    """Black has 1 in both samples. Two agents whose scores differ are no contrast; the rows of one come one by one."""

    async def scenario() -> None:
        async def score(sample: Sample) -> list[ScoreResult]:
            white = of_white if sample.sample_index else 0.0
            return [ScoreResult(1.0 if trajectory.agent == "black" else white) for trajectory in sample.trajectories]

        scores = GroupScores(2, score, EarlyEnd(1, GroupFilter("score")))
        for index in range(2):
            scores.add(sample_of(1, index, "black", "black", "white"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert scores.are_enough() == is_kept
        rows = await scores.of(1)
        assert [(row.sample_index, row.agent, result.score) for row, result in rows[3:]] == [
            (1, "black", 1.0),
            (1, "black", 1.0),
            (1, "white", of_white),
        ]
        columns = samples_of([1] * 6, [result.score for _, result in rows])
        columns["agent"] = np.array([row.agent for row, _ in rows], dtype=object)
        assert (kept_uids(columns, GroupFilter("score")) == [1]) == is_kept

    asyncio.run(scenario())


def test_length_penalties_are_no_contrast_between_wrong_answers() -> None:
    """Under the filter of recipe=dapo; the group of uid 3 alone has a right answer."""
    config = compose(
        "ppo", ["+recipe=dapo", "data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    )
    keep = GroupFilter(config.algorithm.filter_groups.metric)
    row = PromptRow(0, [1], 1, "math_dapo", "42", {}, [], "rule")

    async def score(sample: Sample) -> list[ScoreResult]:
        length = config.data.max_response_length - 1024 * sample.sample_index
        penalty = overlong_penalty(length, config.reward_model.overlong_buffer)
        return [ScoreResult(1.0 if (sample.uid, sample.sample_index) == (3, 0) else -1.0, penalty=penalty)]

    async def scenario() -> None:
        scores = GroupScores(4, score, EarlyEnd(2, keep))
        for uid in (1, 2, 3):
            for index in range(4):
                scores.add(sample_of(uid, index))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not scores.are_enough() and scores.kept == {3}
        trajectories, results = zip(*[scored for uid in (1, 2, 3) for scored in await scores.of(uid)], strict=True)
        samples = to_batch(trajectories, [row] * 12, results, [0] * 12).samples
        assert samples["reward_penalty"].tolist() == [-1.0, -0.75, -0.5, -0.25] * 3
        assert kept_uids(samples, keep) == [3]

    asyncio.run(scenario())


def test_enough_is_when_that_many_groups_are_whole_scored_and_kept() -> None:
    async def scenario() -> None:
        gates = {key: asyncio.Event() for key in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]}

        async def score(sample: Sample) -> list[ScoreResult]:
            await gates[sample.uid, sample.sample_index].wait()
            return [ScoreResult(float(sample.sample_index) if sample.uid != 1 else 1.0)]

        async def let(*keys: tuple[int, int]) -> None:
            for key in keys:
                gates[key].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        scores = GroupScores(2, score, EarlyEnd(1, GroupFilter("score")))
        for sample in (sample_of(1, 0), sample_of(1, 1), sample_of(2, 1)):
            scores.add(sample)
        await let((1, 0), (1, 1), (2, 1))
        # The samples of 1 are alike, 2 is not whole, 3 did not come.
        assert not scores.are_enough() and [scores.is_finished(uid) for uid in (1, 2, 3)] == [True, False, False]
        scores.add(sample_of(2, 0))
        assert not scores.are_enough(), "its score is not there"
        await let((2, 0))
        assert scores.are_enough()
        assert [(sample.sample_index, result.score) for sample, result in await scores.of(2)] == [(0, 0.0), (1, 1.0)]
        assert scores.finished(3) == []
        scores.cancel()

    asyncio.run(scenario())


class CountedLookUps(dict[Any, Any]):
    """Counts the values that are looked up."""

    count = 0

    def __getitem__(self, key: Any) -> Any:
        self.count += 1
        return super().__getitem__(key)


def test_a_failed_sample_does_not_end_a_generation_early() -> None:
    async def scenario() -> None:
        async def score(sample: Sample) -> list[ScoreResult]:
            failed = sample.uid == 1 and sample.sample_index == 1
            return [ScoreResult(0.0, error="it hung") if failed else ScoreResult(-float(sample.sample_index == 0))]

        scores = GroupScores(2, score, EarlyEnd(1, GroupFilter("score")))
        for uid, enough in ((1, False), (2, True)):
            for index in range(2):
                scores.add(sample_of(uid, index))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert scores.are_enough() == enough
        scores.cancel()

    asyncio.run(scenario())


def test_groups_that_wait_for_scores_cost_nothing_at_each_output() -> None:
    """With a slow reward all groups of a step wait, and each of their outputs asks whether there are enough."""

    async def scenario() -> None:
        slow = asyncio.Event()

        async def score(sample: Sample) -> list[ScoreResult]:
            if sample.uid != 5:
                await slow.wait()
            return [ScoreResult(1.0)]

        scores = GroupScores(4, score, EarlyEnd(2))
        scores.tasks = CountedLookUps()
        for uid in range(50):
            for index in range(4):
                scores.add(sample_of(uid, index))
                await asyncio.sleep(0)
                assert not scores.are_enough()
        assert scores.kept == {5} and scores.tasks.count == 4, "the one group that is scored, once"
        scores.cancel()

    asyncio.run(scenario())


def test_a_scoring_that_fails_ends_the_generation_and_is_raised() -> None:
    async def scenario() -> None:
        async def score(sample: Sample) -> list[ScoreResult]:
            raise RuntimeError("the reward function is broken")

        scores = GroupScores(1, score, EarlyEnd(5))
        scores.add(sample_of(1, 0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert scores.are_enough()
        with pytest.raises(RuntimeError, match="broken"):
            await scores.of(1)

    asyncio.run(scenario())
