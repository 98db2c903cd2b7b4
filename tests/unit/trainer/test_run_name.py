"""The names of runs that have none of the user's, and that the same command finds its run again."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from scalerl.config import save_resolved
from scalerl.config.compose import composed
from scalerl.trainer import run_name
from scalerl.trainer.checks.early import composed_run
from scalerl.trainer.run_name import named

PPO = [
    "data.train_files=/data/gsm8k/train.parquet",
    "data.val_files=b.parquet",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
]
SFT = ["data.train_files=[rows.parquet,b.parquet]", "model.path=outputs/my model"]
LR = "actor_rollout_ref.actor.optim.lr=5e-6"


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each name; runs are written below a directory of the test."""
    monkeypatch.chdir(tmp_path)
    seconds = iter(range(100))
    show = time.strftime
    monkeypatch.setattr(run_name.time, "strftime", lambda form: show(form, time.gmtime(next(seconds))))


def begin(overrides: list[str]) -> str:
    """Begins a run as a driver does; returns its directory."""
    cfg = composed_run("ppo", overrides).config
    save_resolved(cfg, Path(cfg.trainer.default_local_dir) / "config.yaml")
    return cfg.trainer.default_local_dir


def test_a_name_says_model_data_and_time() -> None:
    ppo, own = named("ppo", PPO)
    assert own == [f"trainer.experiment_name={ppo.config.trainer.experiment_name}"]
    assert re.fullmatch(r"Qwen3-8B-gsm8k-19700101-000000-[0-9a-f]{6}", ppo.config.trainer.experiment_name)
    assert ppo.config.trainer.default_local_dir == f"outputs/scalerl/{ppo.config.trainer.experiment_name}"
    assert any(ppo.config.trainer.experiment_name in line for line in ppo.lines)
    assert "trainer.experiment_name" not in ppo.set_keys
    sft, _ = named("sft", SFT)
    assert re.fullmatch(r"my-model-rows-sft-19700101-000001-[0-9a-f]{6}", sft.config.trainer.experiment_name)


def test_a_name_of_the_users_stays() -> None:
    composition, own = named("ppo", [*PPO, "trainer.experiment_name=20240101_1530"])
    assert own == [] and composition == composed("ppo", [*PPO, "trainer.experiment_name=20240101_1530"], rules=False)


def test_the_same_command_finds_its_run_again_and_another_one_does_not() -> None:
    first = begin(PPO)
    assert begin(PPO) == first
    # How long it is, where it runs and what it records: the same run.
    goes_on = [
        "trainer.total_training_steps=9",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[file]",
        "trainer.val_only=true",
    ]
    assert begin([*PPO, *goes_on]) == first
    assert begin(list(reversed(PPO))) == first
    others = [
        begin([*PPO, more])
        for more in (LR, "trainer.max_staleness=1", "trainer.critic_warmup=2", "+recipe=ppo", "trainer.project_name=p")
    ]
    assert len({first, *others}) == 6
    assert begin([*PPO, LR]) == others[0]


def test_of_several_runs_the_newest_goes_on() -> None:
    first = begin(PPO)
    newer = first.replace("19700101-000000", "19700102-000000")
    assert newer != first
    Path(newer).mkdir()
    assert begin(PPO) == newer


def test_a_run_in_a_directory_of_the_users_keeps_its_name() -> None:
    given = [*PPO, "trainer.default_local_dir=runs/[one] *"]
    given[-1] = "trainer.default_local_dir='runs/[one] *'"
    assert begin(given) == begin([*given, LR]) == "runs/[one] *"
    first = composed_run("ppo", given).config.trainer.experiment_name
    assert first.startswith("Qwen3-8B-gsm8k-19700101-000000-")
    # Or in one that is named by it.
    of_name = [
        *PPO,
        "trainer.default_local_dir='[runs]/${trainer.experiment_name}/x'",
        "trainer.rollout_data_dir=${trainer.default_local_dir}/r",
    ]
    again = begin(of_name)
    assert begin(of_name) == again and re.fullmatch(r"\[runs\]/Qwen3-8B-gsm8k-[0-9a-f-]+/x", again)
    assert composed_run("ppo", of_name).config.trainer.rollout_data_dir == f"{again}/r"
