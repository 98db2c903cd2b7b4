"""--cfg job prints the configuration of a command, --multirun runs it for each value of a list."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scalerl import cli
from scalerl.config import ConfigError, asked_text, compose, jobs_of, run_jobs
from scalerl.config.compose import value_at
from scalerl.errors import UserError
from scalerl.trainer.run_name import run_directory

PPO = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_job_prints_the_composed_configuration(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *PPO, "recipe=grpo", *flag, "--dry-run", "trainer.experiment_name=e1"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    cfg = compose("ppo", [*PPO, "recipe=grpo", "trainer.experiment_name=e1"])
    assert printed["trainer"]["default_local_dir"] == "outputs/scalerl/e1"
    for key in ("actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.use_kl_loss", "data.train_files"):
        section, name = key.rsplit(".", 1)
        node = printed
        for part in section.split("."):
            node = node[part]
        assert node[name] == value_at(cfg, key)


def test_cfg_of_something_else_or_of_a_wrong_configuration_is_refused() -> None:
    with pytest.raises(UserError, match="--cfg job"):
        asked_text("ppo", [*PPO, "--cfg", "hydra"])
    with pytest.raises(ConfigError, match=r"did you mean data\.seed"):
        asked_text("ppo", [*PPO, "data.sead=1", "--cfg", "job"])
    assert asked_text("ppo", PPO) is None


def test_a_multirun_has_a_job_for_each_value() -> None:
    assert jobs_of([*PPO, f"{LR}=1e-6,1e-5"]) is None
    files = ["--config-dir", "dir", "data.train_files=[a,b]", "trainer.experiment_name='x,y'"]
    jobs = jobs_of(["-m", *files, f"{LR}=1e-6,1e-5", "+recipe=grpo,cpu", "--dry-run"])
    assert jobs is not None and [job[4:6] for job in jobs] == [
        [f"{LR}={lr}", f"+recipe={recipe}"] for lr in ("1e-06", "1e-05") for recipe in ("grpo", "cpu")
    ]
    assert all(job[:4] == files and job[6] == "--dry-run" for job in jobs)
    assert jobs_of(["data.seed=range(1,4)", "--multirun"]) == [["data.seed=1"], ["data.seed=2"], ["data.seed=3"]]


def test_jobs_run_one_after_the_other_until_one_fails() -> None:
    ran: list[list[str]] = []
    codes = {"data.seed=1": 0, "data.seed=2": 75, "data.seed=3": 0}

    def run(job: list[str]) -> int:
        ran.append(job)
        return codes[job[0]]

    jobs = [[name, "--dry-run"] for name in codes]
    assert run_jobs(jobs, run, lambda job: job[-1], "data.output_path") == 75
    assert ran == jobs[:2]
    with pytest.raises(ConfigError, match=r"out: several jobs of --multirun would write there"):
        run_jobs(jobs, run, lambda job: "out", "data.output_path")
    assert len(ran) == 2 and run_jobs(jobs[:1], run, lambda job: None, "data.output_path") == 0


def test_jobs_of_a_training_have_directories_of_their_own() -> None:
    learning_rates = [f"{LR}=1e-6", f"{LR}=1e-5"]
    assert len({run_directory("ppo", [*PPO, each]) for each in learning_rates}) == 2
    # One name for both, and a key that does not change what is learned.
    for jobs in ([[each, "trainer.experiment_name=e"] for each in learning_rates], [["trainer.save_freq=1"], []]):
        assert len({run_directory("ppo", [*PPO, *job]) for job in jobs}) == 1
    name = "trainer.experiment_name='lr-${" + LR + "}'"
    assert len({run_directory("ppo", [*PPO, each, name]) for each in learning_rates}) == 2


def test_all_jobs_are_composed_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "data.path=a.parquet", "data.output_path=o1.parquet,o2.txt", "-m"]) == 2
    said = capsys.readouterr()
    assert "data.output_path = o2.txt" in said.err and said.out == ""
