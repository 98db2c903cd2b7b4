"""Several rollout workers, each with its servers: no number of a run depends on how many they are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Record
from tests.e2e.kept import Kept
from tests.e2e.test_kill_and_resume import reproducible

STEPS = 3
FAULTS = ("rollout/num_restarts", "rollout/num_resubmitted")
# A third of the groups has no sample that differs. With the log of a server it kills that from inside the scoring of a
# training sample, the first of any worker's.
REWARD = """
import os, signal
from scalerl.rewards.trial import TRIAL_RESPONSE
from tests.e2e.graded_reward import server_of

def compute_score(data_source, solution_str, ground_truth, extra_info=None, log=None):
    if log is not None and extra_info["split"] == "train" and solution_str != TRIAL_RESPONSE:
        try:
            os.close(os.open(log + ".struck", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            # Of a server that an earlier run left the log is where that began.
            os.killpg(server_of(os.path.realpath(log)), signal.SIGKILL)
    return {"score": float(sum(map(ord, solution_str)) % 4 == 0), "acc": 1.0}
"""


def arguments(inputs: Inputs, directory: Path, num_workers: int, *more: str) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    reward = directory / "reward.py"
    reward.write_text(REWARD)
    rollout = "actor_rollout_ref.rollout"
    return inputs.overrides(
        directory / "run",
        f"custom_reward_function.path={reward}",
        f"{rollout}.num_replicas=2",
        f"{rollout}.num_workers={num_workers}",
        # One group at a time on each server.
        f"{rollout}.max_num_seqs={SAMPLES}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.log_val_generations=7",
        *more,
    )


@pytest.fixture(scope="module")
def with_one(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    finished = kept.train(arguments(inputs, directory, 1, "algorithm.filter_groups.enable=true"))
    assert finished.code == 0, finished.tail()
    assert_table(directory / "run", inputs)
    return directory / "run"


def assert_table(run_dir: Path, inputs: Inputs) -> None:
    """Of the validation before the first step, as a person reads it."""
    table = json.loads((run_dir / "tables" / "val" / "generations" / "step_0.json").read_text())
    assert table["columns"] == ["prompt", "response", "ground_truth", "score", "data_source", "acc"]
    wanted = pq.read_table(inputs.val).to_pylist()[:7]
    assert [row[2] for row in table["data"]] == [row["reward_model"]["ground_truth"] for row in wanted]
    for row, of_file in zip(table["data"], wanted, strict=True):
        assert of_file["prompt"][-1]["content"] in row[0] and row[4] == of_file["data_source"] and row[5] == 1.0
    assert not any("<|" in text for row in table["data"] for text in row[:2])


def numbers(run_dir: Path) -> dict[int, dict[str, float]]:
    steps = {step: reproducible(data) for step, data in Record.read(run_dir).final.items()}
    return {step: {key: value for key, value in data.items() if key not in FAULTS} for step, data in steps.items()}


def assert_same_run(expected: Path, run_dir: Path) -> None:
    wanted = numbers(expected)
    assert all(wanted[step]["actor/grad_norm"] > 0 for step in range(1, STEPS + 1)), "this would prove nothing"
    assert max(data.get("training/gen_rounds", 0) for data in wanted.values()) > 1, "nothing was joined"
    assert numbers(run_dir) == wanted
    for step in range(1, STEPS + 1):
        theirs, ours = (pq.read_table(at / "rollouts" / f"step_{step}.parquet") for at in (expected, run_dir))
        assert ours.equals(theirs), f"rollouts of step {step}"
    for table in (expected / "tables").rglob("*.json"):
        assert (run_dir / table.relative_to(expected)).read_text() == table.read_text()


def test_two_workers_have_the_numbers_of_one(inputs: Inputs, kept: Kept, with_one: Path, tmp_path: Path) -> None:
    finished = kept.train(arguments(inputs, tmp_path, 2, "algorithm.filter_groups.enable=true"))
    assert finished.code == 0, finished.tail()
    assert_same_run(with_one, tmp_path / "run")
    parts = [path.name for path in sorted((tmp_path / "run" / "rollouts" / "step_1.parquet").iterdir())]
    assert parts == ["part-00000.parquet", "part-00001.parquet"]


@pytest.mark.full
def test_a_server_that_dies_under_two_workers(inputs: Inputs, kept: Kept, with_one: Path, tmp_path: Path) -> None:
    """It is the second worker's, whose samples wait for its successor."""
    log = tmp_path / "run" / "logs" / "rollout-1.log"
    log.parent.mkdir(parents=True)
    more = ["algorithm.filter_groups.enable=true", f"+custom_reward_function.reward_kwargs.log={log}"]
    finished = kept.train(arguments(inputs, tmp_path, 2, *more))
    assert finished.code == 0, finished.tail()
    assert_same_run(with_one, tmp_path / "run")
    record = Record.read(tmp_path / "run").final
    assert sum(data.get("rollout/num_restarts", 0) for data in record.values()) == 1
    assert (tmp_path / "run" / "logs" / "rollout-1.restart-1.log").exists()


@pytest.mark.full
def test_enough_groups_are_counted_over_all_workers(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """Over-sampling whose unfinished groups go on in the next step, with the worker that has them."""
    more = [
        f"data.gen_batch_size={6 * PROMPTS}",
        "actor_rollout_ref.rollout.partial_rollout=true",
        "trainer.max_staleness=3",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.val_before_train=false",
    ]
    finished = kept.train(arguments(inputs, tmp_path, 2, *more))
    assert finished.code == 0, finished.tail()
    record, trained = Record.read(tmp_path / "run").final, []
    for step in range(1, STEPS + 1):
        rows = pq.read_table(tmp_path / "run" / "rollouts" / f"step_{step}.parquet").to_pylist()
        assert set(Counter(row["uid"] for row in rows).values()) == {SAMPLES} and len(rows) == PROMPTS * SAMPLES
        trained += sorted({row["uid"] for row in rows})
        groups = {
            key.rpartition("groups/")[2]: int(value)
            for key, value in record[step].items()
            if key.startswith("training/groups/")
        }
        assert groups.pop("submitted") == sum(groups.values())
        # Neither worker waited until all of its groups were whole.
        assert groups["in_flight"] > PROMPTS, step
    assert len(set(trained)) == len(trained) == STEPS * PROMPTS
    # The second and third step began with what was left, under both workers.
    first_asked = [uid for uid in trained if uid >> 32 == 1]
    assert len(first_asked) > PROMPTS and {(uid & 0xFFFFFFFF) % 2 for uid in trained} == {0, 1}
