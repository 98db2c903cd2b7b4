"""Steps that take more, or older, samples than their own: every group is trained once or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import StartJob
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Pause, Record, main_ppo
from tests.e2e.kept import Kept

CORRECTED = "algorithm.rollout_correction.rollout_is=token"
OWN_POOL = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.resource_pool.nnodes=1"]
# One sample in four scores 1: a third of the groups of four has no sample that differs.
RARE_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(sum(map(ord, solution_str)) % 4 == 0), "acc": 1.0}
"""


def rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pylist()


def groups(data: dict[str, float]) -> dict[str, int]:
    """What the ledger says when a step begins to train on its batch."""
    name = "training/groups/"
    return {key.removeprefix(name): int(value) for key, value in data.items() if key.startswith(name)}


def assert_conserved(data: dict[str, float], step: int) -> None:
    counts = groups(data)
    assert counts.pop("submitted") == sum(counts.values())
    assert counts["trained"] == (step - 1) * PROMPTS


def assert_whole_groups(batch: list[dict[str, Any]]) -> None:
    assert len(batch) == PROMPTS * SAMPLES
    assert set(Counter(row["uid"] for row in batch).values()) == {SAMPLES}


@pytest.mark.full
def test_one_step_off_over_a_sigkill(inputs: Inputs, start_job: StartJob, tmp_path: Path) -> None:
    """The servers generate step k + 1 while step k trains. What was in flight at the crash is asked for again."""
    run_dir, pause, steps = tmp_path / "run", Pause(tmp_path / "pause"), 5
    arguments = main_ppo(
        inputs.overrides(
            run_dir,
            *OWN_POOL,
            CORRECTED,
            "trainer.max_staleness=1",
            f"trainer.total_training_steps={steps}",
            "trainer.val_before_train=false",
            "trainer.save_freq=2",
            f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}",
        )
    )
    # Step 4's samples are asked for before step 3 trains, which then waits for them with its weights; the checkpoint is
    # of step 2.
    pause.in_step(4)
    job = start_job(arguments, run_dir)
    job.wait_for(pause.reached, "a sample of step 4")
    assert 3 not in Record.read(run_dir).final
    job.kill_driver()
    job.process.wait(60)
    pause.over()
    job.assert_gone()
    job.kill_all()

    resumed = start_job(arguments, run_dir)
    assert resumed.finish() == 0, resumed.tail()
    resumed.assert_gone()
    record = Record.read(run_dir).final
    trained: list[int] = []
    for step in range(1, steps + 1):
        batch, data = rows(run_dir, step), record[step]
        assert_whole_groups(batch)
        assert_conserved(data, step)
        # Nothing is older than a step; the first of a run, and the first after its resume, are not older at all.
        version = step - 1 if step in (1, 3) else step - 2
        assert {row["policy_version"] for row in batch} == {version}, f"step {step}"
        assert data["training/staleness/max"] == step - 1 - version
        assert groups(data)["in_flight"] == PROMPTS * (1 + (step < steps))
        trained += sorted({row["uid"] for row in batch})
    assert len(trained) == len(set(trained)) == steps * PROMPTS
    assert len({row["prompt_uid"] for step in range(1, steps + 1) for row in rows(run_dir, step)}) == steps * PROMPTS


@pytest.mark.full
def test_samples_that_are_interrupted_go_on_under_the_next_policy(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """A real SGLang server, paused with requests running at every sync. A validation runs among them."""
    run_dir, steps, length = tmp_path / "run", 4, 112
    policy = "actor_rollout_ref"
    arguments = inputs.overrides(
        run_dir,
        *OWN_POOL,
        CORRECTED,
        f"{policy}.rollout.name=sglang",
        f"{policy}.rollout.partial_rollout=true",
        # One group at a time: a batch takes longer than a step of the trainer.
        f"{policy}.rollout.max_num_seqs={SAMPLES}",
        f"{policy}.rollout.ignore_eos=true",
        f"{policy}.actor.max_tokens_per_micro_batch=512",
        f"data.max_response_length={length}",
        "data.val_max_samples=4",
        "trainer.max_staleness=2",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=2",
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    record = Record.read(run_dir).final
    num_interrupted = 0
    for step in range(1, steps + 1):
        batch, data = rows(run_dir, step), record[step]
        assert_whole_groups(batch)
        assert_conserved(data, step)
        for row in batch:
            versions = row["policy_versions"][row["prompt_length"] :]
            assert len(versions) == row["response_length"] == length
            assert versions == sorted(versions) and versions[0] == row["policy_version"]
            assert max(0, step - 3) <= versions[0] and versions[-1] <= step - 1
            num_interrupted += versions[0] < versions[-1]
        # Each token's log-prob is of the policy that drew it: the trainer's newer one differs, the sampler's does not
        # where the whole sample is of the trainer's version.
        if data["training/staleness/max"] == 0:
            assert abs(data["rollout_corr/token_log_ratio_max"]) < 1e-4
    assert num_interrupted > 0, "nothing ran while the weights changed"
    assert {0, 2, 4} <= {step for step, data in record.items() if any(key.startswith("val-core/") for key in data)}


def test_dapo_drops_groups_that_teach_nothing_and_refills(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 4
    reward = tmp_path / "rare_reward.py"
    reward.write_text(RARE_REWARD)
    arguments = inputs.overrides(
        run_dir,
        f"custom_reward_function.path={reward}",
        "reward_model.overlong_buffer.len=4",
        "reward_model.overlong_buffer.penalty_factor=0.0",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "+recipe=[dapo,cpu]",
    )[1:]
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    record = Record.read(run_dir).final
    uids: list[int] = []
    for step in range(1, steps + 1):
        batch, data = rows(run_dir, step), record[step]
        assert_whole_groups(batch)
        assert_conserved(data, step)
        for uid in {row["uid"] for row in batch}:
            assert len({row["score"] for row in batch if row["uid"] == uid}) == 2
        assert data["training/staleness/max"] == 0
        assert data["actor/ppo_kl_first_update"] == 0.0
        uids += sorted({row["uid"] for row in batch})
    last = groups(record[steps])
    assert last["dropped/no_contrast"] > 0 and max(data["training/gen_rounds"] for data in record.values()) > 1
    assert last["dropped/unfinished"] == last["dropped/stale"] == 0
    assert len(set(uids)) == steps * PROMPTS


@pytest.mark.full
def test_over_sampling_trains_the_groups_that_are_whole_first(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 3
    arguments = inputs.overrides(
        run_dir,
        f"data.gen_batch_size={2 * PROMPTS}",
        # One group at a time: the others have not begun when there are enough.
        f"actor_rollout_ref.rollout.max_num_seqs={SAMPLES}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
    )
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    record = Record.read(run_dir).final
    trained: list[int] = []
    for step in range(1, steps + 1):
        batch = rows(run_dir, step)
        assert_whole_groups(batch)
        assert_conserved(record[step], step)
        trained += sorted({row["uid"] for row in batch})
    assert len(set(trained)) == steps * PROMPTS
    last = groups(record[steps])
    # One that becomes whole just as there are enough is dropped for another reason than those that have not begun.
    dropped = sum(count for reason, count in last.items() if reason.startswith("dropped/"))
    assert last["submitted"] == 2 * PROMPTS * steps and dropped == PROMPTS * steps and last["dropped/unfinished"] > 0
