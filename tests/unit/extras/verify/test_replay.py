"""What a step is computed again from, read out of its dump."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from scalerl.batch.turns import column_of
from scalerl.data import PromptRow
from scalerl.extras.verify.replay import read_dump
from scalerl.rewards.manager import ScoreResult
from scalerl.rollout.program import Trajectory
from scalerl.rollout.sampling.dump import write_dump
from scalerl.rollout.sampling.sample_columns import to_batch
from scalerl.rollout.servers.requests import GenerateOutput


def test_the_columns_of_a_dump_are_those_that_the_rollout_made(tmp_path: Path) -> None:
    """A sample of two turns, one that failed before its first, and what an earlier version wrote."""
    prompt = PromptRow(3, [1, 2], 2, "source", "truth", {}, [{"role": "user", "content": "?"}], "rule")
    trajectories = [Trajectory(0, index, prompt.input_ids, 9) for index in range(2)]
    for reward in (0.5, -1.0):
        trajectories[0].parts.append(GenerateOutput("0/0", 0, [7, 8], [-0.5, -1.5], "stop", 4, reward=reward))
    results = [ScoreResult(1.0, {"acc": 1}), ScoreResult(0.0, error="environment: gone")]
    made = to_batch(trajectories, [prompt] * 2, results, seeds=[1, 2])
    path = tmp_path / "step_1.parquet"
    write_dump(path, made.tokens, made.samples, [("", "")] * 2)
    tokens, samples = read_dump(path)
    assert {name: column.tolist() for name, column in samples.items()} == {
        name: column.tolist() for name, column in made.samples.items()
    }
    assert all(tokens.tokens[name].values.equal(made.tokens[name].values) for name in tokens.tokens)
    pq.write_table(pq.read_table(path).drop_columns(["turn_lengths", "turn_rewards"]), path)
    _, samples = read_dump(path)
    assert samples["turn_lengths"].tolist() == column_of([[4], [0]]).tolist()
    assert samples["turn_rewards"].tolist() == [(0.0,), (0.0,)]
