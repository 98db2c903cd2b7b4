"""Rollout servers that are killed or stopped while a run uses them: it goes on to the numbers it would have had."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scalerl.errors import EXIT_FAILED
from scalerl.rollout.sampling.groups import SampleGroup
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import PROMPTS, SAMPLES, Inputs, Job, Record, Strike, main_ppo
from tests.e2e.kept import Kept
from tests.e2e.test_kill_and_resume import STEPS, assert_same_samples, assert_same_weights, reproducible

# With a prompt as many tokens as a micro-batch has.
RESPONSE = 48
# A request's whole time on a busy machine, and what a hang costs a test, twice.
REQUEST_TIMEOUT_S = 12
MODEL = "actor_rollout_ref.model"
FAULTS = ("rollout/num_restarts", "rollout/num_resubmitted")


def arguments(inputs: Inputs, run_dir: Path, strikes: list[Strike], *more: str) -> list[str]:
    """One sample at a time on each server, so that most of a step is still to come at its second sample."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "strikes.json"
    file.write_text(json.dumps([strike.as_json(run_dir) for strike in strikes]))
    rollout = "actor_rollout_ref.rollout"
    return inputs.overrides(
        run_dir,
        "+layout=tp2",
        f"data.max_response_length={RESPONSE}",
        f"{rollout}.ignore_eos=true",
        f"{rollout}.max_num_seqs=1",
        f"{rollout}.request_timeout_s={REQUEST_TIMEOUT_S}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=4",
        "trainer.test_freq=2",
        f"+custom_reward_function.reward_kwargs.strikes_file={file}",
        *more,
    )


def run(start_job: StartJob, arguments: list[str], run_dir: Path) -> Job:
    job = start_job(main_ppo(arguments), run_dir)
    assert job.finish() == 0, job.tail()
    job.assert_gone()
    # The last words of a server may hold one.
    own = [line for line in job.stderr.splitlines() if not line.startswith("  | ")]
    assert not any("Traceback" in line for line in own), job.tail()
    return job


@pytest.fixture(scope="module")
def undisturbed(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    finished = kept.train(arguments(inputs, run_dir, []))
    assert finished.code == 0, finished.tail()
    return run_dir


def assert_same_run(expected: Path, run_dir: Path, tmp_path: Path) -> None:
    wanted, metrics_by_step = (numbers_but_faults(at) for at in (expected, run_dir))
    assert all(wanted[step]["actor/grad_norm"] > 0 for step in range(1, STEPS + 1)), "this would prove nothing"
    assert metrics_by_step == wanted
    assert_same_samples(expected, run_dir)
    assert_same_weights(expected, run_dir, tmp_path)


def numbers_but_faults(run_dir: Path) -> dict[int, dict[str, float]]:
    steps = {step: reproducible(data) for step, data in Record.read(run_dir).final.items()}
    return {step: {key: value for key, value in data.items() if key not in FAULTS} for step, data in steps.items()}


@pytest.mark.full
def test_one_of_two_servers_dies(
    inputs: Inputs, kept: Kept, undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In processes that the undisturbed run had."""
    run_dir, strikes = tmp_path / "run", [Strike(1, 0, signal.SIGKILL)]
    finished = kept.train(arguments(inputs, run_dir, strikes, "actor_rollout_ref.rollout.num_replicas=2"))
    assert finished.code == 0, finished.tail()
    assert_struck_and_the_same(run_dir, strikes, caplog.text, undisturbed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "strikes",
    [
        pytest.param([Strike(1, 0, signal.SIGKILL)], id="dies"),
        pytest.param([Strike(1, 0, signal.SIGKILL), Strike(3, 1, signal.SIGSTOP)], id="busy"),
        pytest.param(
            [
                Strike(1, 0, signal.SIGKILL),
                Strike(2, 1, signal.SIGKILL, idle=True),
                Strike(3, 1, signal.SIGSTOP),
                Strike(4, 0, signal.SIGSTOP, idle=True),
            ],
            id="busy and idle",
        ),
    ],
)
def test_two_servers_that_die_and_hang_in_turn(
    inputs: Inputs, start_job: StartJob, undisturbed: Path, tmp_path: Path, strikes: list[Strike]
) -> None:
    run_dir = tmp_path / "run"
    job = run(start_job, arguments(inputs, run_dir, strikes, "actor_rollout_ref.rollout.num_replicas=2"), run_dir)
    assert_struck_and_the_same(run_dir, strikes, job.stderr, undisturbed, tmp_path)


def assert_struck_and_the_same(
    run_dir: Path, strikes: list[Strike], told: str, undisturbed: Path, tmp_path: Path
) -> None:
    """A run with two servers was struck as it was to be, told of it, and is the undisturbed one."""
    metrics = Record.read(run_dir).final
    struck = {strike.step: strike for strike in strikes}
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/num_restarts"] == (1.0 if step in struck else 0.0), step
        # How many samples a server has left when the signal comes is a race with it; idle servers have none.
        had_samples = step in struck and not struck[step].idle
        assert (metrics[step]["rollout/num_resubmitted"] > 0) == had_samples, step
    assert_same_run(undisturbed, run_dir, tmp_path)
    signums = [strike.signum for strike in strikes]
    assert told.count("It ended with exit code 137.") == signums.count(signal.SIGKILL)
    assert told.count("It was still running and was killed.") == signums.count(signal.SIGSTOP)
    restarts = Counter(strike.replica for strike in strikes)
    for nth in (1, 2):
        expected = sum(count >= nth for count in restarts.values())
        assert told.count(f"Restart {nth} of at most 3.") == expected
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    again = {index: ["", *(f".restart-{nth}" for nth in range(1, restarts[index] + 1))] for index in (0, 1)}
    assert logs == {f"rollout-{index}{name}.log" for index, names in again.items() for name in names}


@pytest.mark.full
def test_the_only_server_dies(inputs: Inputs, start_job: StartJob, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    only_one = "actor_rollout_ref.rollout.num_replicas=1"
    run(start_job, arguments(inputs, run_dir, [Strike(2, 0, signal.SIGKILL)], only_one), run_dir)
    metrics = Record.read(run_dir).final
    assert [metrics[step]["rollout/num_restarts"] for step in range(1, STEPS + 1)] == [0.0, 1.0, 0.0, 0.0]
    assert metrics[2]["rollout/num_resubmitted"] > 0
    assert_same_run(undisturbed, run_dir, tmp_path)


@pytest.mark.full
def test_servers_on_devices_of_their_own(
    inputs: Inputs, start_job: StartJob, undisturbed: Path, tmp_path: Path
) -> None:
    """Weights are broadcast to them; one that is lost is replaced, and joins again. The numbers are those of servers
    on the trainer's devices."""
    run_dir = tmp_path / "run"
    pool = "actor_rollout_ref.rollout.resource_pool"
    own = [
        "actor_rollout_ref.hybrid_engine=false",
        f"{pool}.nnodes=1",
        f"{pool}.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.num_replicas=null",
    ]
    strikes = [Strike(2, 1, signal.SIGKILL), Strike(3, 0, signal.SIGKILL, idle=True)]
    run(start_job, arguments(inputs, run_dir, strikes, *own), run_dir)
    metrics = Record.read(run_dir).final
    assert [metrics[step]["rollout/num_restarts"] for step in range(1, STEPS + 1)] == [0.0, 1.0, 1.0, 0.0]
    assert metrics[2]["rollout/num_resubmitted"] > 0 and metrics[3]["rollout/num_resubmitted"] == 0.0
    assert_same_run(undisturbed, run_dir, tmp_path)
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs == {f"rollout-{index}{again}.log" for index in (0, 1) for again in ("", ".restart-1")}


@pytest.mark.full
def test_the_only_server_dies_again_and_again_and_ends_the_run_with_its_last_words(
    inputs: Inputs, start_job: StartJob, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    strikes = [Strike(step, 0, signal.SIGABRT) for step in (2, 3)]
    limit = ["actor_rollout_ref.rollout.max_restarts=1", "actor_rollout_ref.rollout.num_replicas=1"]
    job = start_job(main_ppo(arguments(inputs, run_dir, strikes, *limit)), run_dir)
    assert job.finish() == EXIT_FAILED, job.tail()
    job.assert_gone()
    metrics = Record.read(run_dir).final
    assert [metrics[step]["rollout/num_restarts"] for step in (1, 2)] == [0.0, 1.0]
    assert metrics[2]["rollout/num_resubmitted"] > 0
    # The successor had to serve the weights after one update: the step came out as it should.
    wanted = numbers_but_faults(undisturbed)
    assert numbers_but_faults(run_dir) == {step: wanted[step] for step in (0, 1, 2)}
    # At the start of a line: the log's own lines are indented.
    error = job.stderr.rpartition("\nerror: ")[2]
    assert error.startswith("rollout server 0 was lost: "), job.tail()
    assert "It ended with exit code 134." in error
    log = run_dir / "logs" / "rollout-0.restart-1.log"
    last_line = [line.rstrip() for line in log.read_text().splitlines() if line.strip()][-1]
    assert f"Last lines of its log {log}:" in error and f"  | {last_line}" in error
    assert "It was restarted 1 times in this run, actor_rollout_ref.rollout.max_restarts=1" in error


@pytest.mark.full
@pytest.mark.parametrize(
    "trained",
    [
        pytest.param([], id="all weights"),
        # The new server has the model from its files, and gets the adapter.
        pytest.param([f"{MODEL}.lora_rank=4", "actor_rollout_ref.rollout.verify_weights_every=1"], id="an adapter"),
    ],
)
def test_a_real_sglang_server_dies(inputs: Inputs, start_job: StartJob, tmp_path: Path, trained: list[str]) -> None:
    run_dir = tmp_path / "run"
    more = [
        *trained,
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.num_replicas=1",
        "actor_rollout_ref.rollout.request_timeout_s=120",
        "actor_rollout_ref.actor.optim.lr=3e-2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.save_freq=0",
        "trainer.test_freq=-1",
    ]
    job = run(start_job, arguments(inputs, run_dir, [Strike(2, 0, signal.SIGKILL)], *more), run_dir)
    metrics = Record.read(run_dir).final
    assert [metrics[step]["rollout/num_restarts"] for step in (1, 2)] == [0.0, 1.0]
    assert metrics[2]["rollout/num_resubmitted"] > 0
    assert "rollout server 0 was lost" in job.stderr
    for step in (1, 2):
        rollouts = pq.read_table(run_dir / "rollouts" / f"step_{step}.parquet").to_pydict()
        keys = list(zip(rollouts["uid"], rollouts["sample_index"], strict=True))
        groups = [SampleGroup(0, step, position) for position in range(PROMPTS)]
        assert keys == [(group.uid, sample) for group in groups for sample in range(SAMPLES)]
        assert set(rollouts["response_length"]) == {RESPONSE}
        assert set(rollouts["policy_version"]) == {step - 1}
        # The new server started from the files of the model: without the weights of step 1 it would be far off.
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-4
