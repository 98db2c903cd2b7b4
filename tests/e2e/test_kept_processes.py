"""Processes that one run leaves and the next one takes: the numbers of new processes, and nothing of the run before."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pyarrow.parquet as pq
import pytest

from scalerl.config import PPOConfig
from scalerl.rewards.trial import TRIAL_RESPONSE
from scalerl.rollout.servers.host import server_seed
from scalerl.trainer import build
from scalerl.trainer.build import start_order
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Record, main_ppo, numbered, only, refused
from tests.e2e.kept import Kept
from tests.e2e.test_kill_and_resume import reproducible
from tests.lanes import mostly_full

STEPS = 2
# Of the recipe cpu.
WORLD_SIZE = 2
SHORT = (f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false")
CRITIC = ("algorithm.adv_estimator=gae",)
NARROW_SERVERS = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
# Other worlds, layouts, roles and pools than the run that is compared.
OTHERS = {
    "four_ranks": ("trainer.n_gpus_per_node=4", "+layout=tp2_pp2", NARROW_SERVERS),
    "a_pool_for_the_critic": (
        *CRITIC,
        "trainer.n_gpus_per_node=1",
        "critic.resource_pool.nnodes=1",
        "critic.resource_pool.n_gpus_per_node=2",
    ),
    "one_rank": ("trainer.n_gpus_per_node=1", "data.max_response_length=12"),
}
OWN_ESTIMATOR = """
import torch
from scalerl.algorithms import register_adv_est

@register_adv_est("own")
def own(rewards_S, uids_S, config):
    return torch.full_like(rewards_S, {value})
"""


def processes_of(title: str) -> set[int]:
    """Live ones below this process."""
    pids = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith(title):
                pids.add(process.pid)
    return pids


def commands() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Of the processes below this one."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield process, process.cmdline()


def seeds_of_servers() -> set[int]:
    """Of the SGLang servers below this process."""
    option = "--random-seed"
    return {int(command[command.index(option) + 1]) for _, command in commands() if option in command}


def ranks() -> set[int]:
    return processes_of("ray::RankProcess")


def train(kept: Kept, inputs: Inputs, run_dir: Path, *overrides: str) -> dict[int, dict[str, float]]:
    finished = kept.train(inputs.overrides(run_dir, *SHORT, *overrides))
    assert finished.code == 0, finished.tail()
    return Record.read(run_dir).final


@pytest.fixture(scope="module")
def new(inputs: Inputs, start_job: StartJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in processes of its own."""
    run_dir = tmp_path_factory.mktemp("new")
    job = start_job(main_ppo(inputs.overrides(run_dir, *SHORT, *CRITIC)), run_dir)
    assert job.finish() == 0, job.tail()
    return run_dir


@pytest.mark.full
@pytest.mark.parametrize("name", mostly_full(OTHERS, lambda name: name == "four_ranks"))
def test_the_numbers_are_those_of_new_processes(
    inputs: Inputs, kept: Kept, new: Path, tmp_path: Path, name: str
) -> None:
    wanted = {step: reproducible(data) for step, data in Record.read(new).final.items()}
    assert wanted[STEPS]["actor/grad_norm"] > 0 and wanted[STEPS]["critic/grad_norm"] > 0
    train(kept, inputs, tmp_path / "other", *OTHERS[name])
    run_dir = tmp_path / "run"
    metrics_by_step = train(kept, inputs, run_dir, *CRITIC)
    assert {step: reproducible(data) for step, data in metrics_by_step.items()} == wanted
    for step in range(1, STEPS + 1):
        theirs, ours = (pq.read_table(at / "rollouts" / f"step_{step}.parquet") for at in (new, run_dir))
        assert ours.equals(theirs), f"samples of step {step}"
    before = ranks()
    again = train(kept, inputs, tmp_path / "again", *CRITIC)
    assert {step: reproducible(data) for step, data in again.items()} == wanted
    assert len(before) >= 2 and ranks() == before, "the last two runs had the same processes"


@pytest.mark.full
def test_what_goes_on_is_found_and_what_died_while_it_waited_is_not_taken(
    inputs: Inputs, kept: Kept, tmp_path: Path
) -> None:
    """The log of a server that goes on is in each run's directory."""
    for name in ("first", "second"):
        train(kept, inputs, tmp_path / name)
    logs = [(tmp_path / name / "logs" / "rollout-0.log").resolve() for name in ("first", "second")]
    assert logs[0] == logs[1] and logs[0].is_file()
    for pid in ranks():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    train(kept, inputs, tmp_path / "after")


@pytest.mark.full
def test_a_run_of_another_seed_samples_with_its_own_on_sglang(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    seeds: dict[str, set[int]] = {}
    for name, seed in (("first", 1), ("second", 2), ("third", 2)):
        one_server = ("actor_rollout_ref.rollout.name=sglang", "trainer.n_gpus_per_node=1", NARROW_SERVERS)
        train(kept, inputs, tmp_path / name, *one_server, f"actor_rollout_ref.rollout.seed={seed}")
        seeds[name] = seeds_of_servers()
    wanted = {seed: server_seed(seed, index=0, first_step=0, num_restarts=0) for seed in (1, 2)}
    assert (
        seeds["first"] == {wanted[1]}
        and seeds["second"] - seeds["first"] == {wanted[2]} == {wanted[2]} & seeds["third"]
    )
    # The run before had the same seed, so that this one has its server.
    logs = [(tmp_path / name / "logs" / "rollout-0.log").resolve() for name in ("first", "second", "third")]
    assert logs[0] != logs[1] == logs[2]


@pytest.mark.full
def test_models_may_be_built_before_the_servers_start(
    inputs: Inputs, kept: Kept, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs that both share: the same numbers."""
    asked: list[str] = []

    def as_on_gpus(cfg: PPOConfig, device: str) -> tuple[Literal["models", "servers"], Literal["models", "servers"]]:
        asked.append(device)
        return start_order(cfg, "cuda")

    monkeypatch.setattr(build, "start_order", as_on_gpus)
    metrics_by_step = train(kept, inputs, tmp_path / "run", *CRITIC)
    wanted = {step: reproducible(data) for step, data in Record.read(new).final.items()}
    assert {step: reproducible(data) for step, data in metrics_by_step.items()} == wanted and asked == ["cpu"]


def test_files_of_the_user_are_forgotten(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """Two files register the same name, one after the other; then nobody does."""
    for number, value in enumerate((0.25, 0.5)):
        path = tmp_path / f"own_{number}.py"
        path.write_text(OWN_ESTIMATOR.format(value=value))
        record = train(
            kept, inputs, tmp_path / f"run_{number}", f"trainer.import_files=[{path}]", "algorithm.adv_estimator=own"
        )
        assert record[1]["critic/advantages/mean"] == pytest.approx(value)
    arguments = inputs.overrides(tmp_path / "run", *SHORT, "algorithm.adv_estimator=own")
    only(numbered(refused(kept.train(arguments))), "algorithm.adv_estimator='own'")


@pytest.mark.full
def test_a_run_that_fails_leaves_no_process_and_the_next_one_starts_anew(
    inputs: Inputs, kept: Kept, tmp_path: Path
) -> None:
    train(kept, inputs, tmp_path / "before")
    before = ranks()
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    if extra_info['split'] == 'train' and solution_str != {TRIAL_RESPONSE!r}:\n"
        "        raise LookupError('no score')\n"
        "    return 0.0\n"
    )
    finished = kept.train(inputs.overrides(tmp_path / "run", *SHORT, f"custom_reward_function.path={reward}"))
    assert finished.code == 2 and "LookupError: no score" in finished.stderr
    # Their pool goes, with all that waits there. Other pools, of other tests, stay.
    deadline = time.monotonic() + 60
    while len(before - ranks()) < WORLD_SIZE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(before - ranks()) >= WORLD_SIZE, "what they were in the middle of is not known"
    train(kept, inputs, tmp_path / "after")


@pytest.mark.full
def test_memory_does_not_grow_with_the_number_of_runs(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    """Resident memory of ranks, rollout worker and server, after 15 and after 30 runs of changing layouts."""
    layouts: list[tuple[str, ...]] = [(), ("+layout=tp2", NARROW_SERVERS), CRITIC]
    kinds = re.compile(r"ray::(RankProcess|RolloutWorker|ServerHost)|.*(embedded\.server)")

    def resident_mib() -> dict[str, float]:
        mib_by_name: dict[str, float] = {}
        for process, command in commands():
            if kind := kinds.match(" ".join(command)):
                name = kind[1] or kind[2]
                with contextlib.suppress(psutil.NoSuchProcess):
                    mib_by_name[name] = max(mib_by_name.get(name, 0.0), process.memory_info().rss / 2**20)
        return mib_by_name

    def resident_after(first: int, runs: int) -> dict[str, float]:
        """The least after any of the last three of these runs: what the allocator keeps for a while comes and goes."""
        readings = []
        for number in range(first, first + runs):
            train(kept, inputs, tmp_path / f"run_{number}", *layouts[number % 3])
            readings.append(resident_mib())
        return {name: min(reading[name] for reading in readings[-3:]) for name in readings[-1]}

    before = resident_after(0, 15)
    after = resident_after(15, 15)
    assert before.keys() == after.keys() and {"RankProcess", "RolloutWorker", "embedded.server"} <= before.keys()
    # A model with its gradients and optimizer has 4 MiB, imports 500.
    assert {name: after[name] - before[name] < 40 for name in before} == dict.fromkeys(before, True), (before, after)
