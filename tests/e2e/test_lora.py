"""Whole runs that train adapters: the policy's, a critic's, and in fine-tuning. Embedded engine."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl.checkpoint.pieces import DIST_CKPT
from scalerl.checkpoint.torch_dist import DistCheckpoint
from scalerl.extras.verify.differences import reproducible
from tests.e2e.conftest import StartJob
from tests.e2e.jobs import Inputs, Pause, Record, main_ppo
from tests.e2e.kept import Kept
from tests.e2e.test_sft import overrides as sft_overrides
from tests.lanes import mostly_full
from tests.unit.merge.test_merge_adapters import IDS, logits
from tests.unit.merge.test_merge_adapters import run as merge

STEPS = 4
MODEL = "actor_rollout_ref.model"
ADAPTER = [f"{MODEL}.lora_rank=8", "actor_rollout_ref.actor.use_kl_loss=true"]
CRITIC = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=4", "critic.model.target_modules=[q_proj,down_proj]"]
LAYOUTS = {"dp2": [], "tp2": ["+layout=tp2"], "dp2 with a critic": CRITIC}


def overrides(inputs: Inputs, layout: str, run_dir: Path, *more: str) -> list[str]:
    return inputs.overrides(
        run_dir,
        *ADAPTER,
        *LAYOUTS[layout],
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.rollout.verify_weights_every=1",
        *more,
    )


@pytest.fixture(scope="module")
def uninterrupted(inputs: Inputs, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """layout -> directory of a run that nobody disturbed."""
    done: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in done:
            done[layout] = tmp_path_factory.mktemp("uninterrupted")
            finished = kept.train(overrides(inputs, layout, done[layout]))
            assert finished.code == 0, finished.tail()
        return done[layout]

    return run


def stored(run_dir: Path, role: str = "actor", step: int = STEPS) -> dict[str, torch.Tensor]:
    with DistCheckpoint(run_dir / f"global_step_{step}" / role / DIST_CKPT) as checkpoint:
        return {key: checkpoint.read(key) for key in checkpoint.tensors}


def assert_same_run(run_dir: Path, expected: Path) -> None:
    """Every number of every step, and every number that the checkpoints have, to the bit."""
    theirs, ours = (Record.read(at).final for at in (expected, run_dir))
    assert {step: reproducible(data) for step, data in ours.items()} == {
        step: reproducible(data) for step, data in theirs.items()
    }
    for role in ("actor", "critic"):
        if (expected / f"global_step_{STEPS}" / role).is_dir():
            wanted, found = stored(expected, role), stored(run_dir, role)
            assert wanted.keys() == found.keys()
            assert [key for key in wanted if not wanted[key].equal(found[key])] == []


def go_back(run_dir: Path) -> None:
    """Makes step 2 the last one that a finished run has saved."""
    shutil.rmtree(run_dir / f"global_step_{STEPS}")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("2")


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, lambda layout: layout == "dp2 with a critic"))
def test_an_adapter_is_trained_and_served(uninterrupted: Callable[[str], Path], layout: str) -> None:
    run_dir = uninterrupted(layout)
    record = Record.read(run_dir).final
    for step in range(1, STEPS + 1):
        # What servers sample from is what is trained, and changes with each step.
        assert record[step]["training/rollout_probs_diff_max"] < 1e-4
        assert record[step]["actor/ppo_kl_first_update"] == pytest.approx(0.0, abs=1e-6)
        assert record[step]["actor/grad_norm"] > 0
    # The reference is the model without its adapter, which it begins as.
    distances = [record[step]["actor/kl_loss"] for step in range(1, STEPS + 1)]
    assert distances[0] < distances[-1] and distances[-1] > 0
    weights = {key: tensor for key, tensor in stored(run_dir).items() if not key.startswith("optimizer.")}
    assert all(".lora_" in key and tensor.any() for key, tensor in weights.items())
    assert {key.rpartition(".lora_")[2] for key in weights} == {"A", "B"}


def test_a_critic_trains_its_adapter_and_its_head(uninterrupted: Callable[[str], Path]) -> None:
    run_dir = uninterrupted("dp2 with a critic")
    before, after = stored(run_dir, "critic", 2), stored(run_dir, "critic")
    weights = {key for key in after if not key.startswith("optimizer.")}
    assert {key.rpartition(".lora_")[0].rpartition(".")[2] for key in weights} == {"q_proj", "down_proj", ""}
    assert "output_layer.weight" in weights
    assert not [key for key in weights if before[key].equal(after[key])]


@pytest.mark.parametrize("layout", mostly_full(LAYOUTS, lambda layout: layout == "dp2 with a critic"))
def test_a_run_goes_on_from_a_checkpoint(
    inputs: Inputs, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    expected, run_dir = uninterrupted(layout), tmp_path / "run"
    shutil.copytree(expected, run_dir)
    go_back(run_dir)
    finished = kept.train(overrides(inputs, layout, run_dir))
    assert finished.code == 0, finished.tail()
    assert f"resumed from {run_dir / 'global_step_2'}" in finished.stdout
    assert_same_run(run_dir, expected)
    # One more step than the checkpoint has, of a run that trains all weights.
    whole = [f"{MODEL}.lora_rank=0", f"trainer.total_training_steps={STEPS + 1}"]
    refused = kept.train(overrides(inputs, layout, run_dir, *whole))
    assert refused.code != 0
    assert "has an adapter of rank 8 and alpha 16" in refused.stderr and "trains all weights" in refused.stderr


@pytest.mark.full
def test_fine_tuning_trains_an_adapter_and_goes_on(inputs: Inputs, kept: Kept, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    more = ["model.lora_rank=8", "optim.lr=0.01", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"]
    more += ["trainer.max_actor_ckpt_to_keep=null", "trainer.logger=[console,file]"]
    for run_dir in (whole, resumed):
        finished = kept.sft(sft_overrides(inputs, tmp_path, *more, f"trainer.default_local_dir={run_dir}"))
        assert finished.code == 0, finished.tail()
        if run_dir == whole:
            shutil.copytree(whole, resumed)
            go_back(resumed)
    assert f"resumed from {resumed / 'global_step_2'}" in finished.stdout
    assert_same_run(resumed, whole)
    losses = {step: data["val/loss"] for step, data in Record.read(whole).final.items() if "val/loss" in data}
    assert losses.keys() == {0, STEPS} and losses[STEPS] < 0.9 * losses[0]
    weights = {key: tensor for key, tensor in stored(whole).items() if not key.startswith("optimizer.")}
    assert weights and all(".lora_" in key and tensor.any() for key, tensor in weights.items())


@pytest.mark.full
def test_a_killed_run_goes_on(
    inputs: Inputs, start_job: StartJob, kept: Kept, uninterrupted: Callable[[str], Path], tmp_path: Path
) -> None:
    expected, run_dir, pause = uninterrupted("dp2"), tmp_path / "run", Pause(tmp_path / "pause")
    arguments = overrides(inputs, "dp2", run_dir, f"+custom_reward_function.reward_kwargs.pause_dir={pause.directory}")
    pause.in_step(3)
    killed = start_job(main_ppo(arguments), run_dir)
    killed.wait_for(pause.reached, "step 3")
    killed.kill_driver(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    killed.assert_gone()
    pause.over()
    finished = kept.train(arguments)
    assert finished.code == 0, finished.tail()
    assert f"resumed from {run_dir / 'global_step_2'}" in finished.stdout
    assert_same_run(run_dir, expected)


@pytest.mark.full
def test_the_adapter_of_a_run_is_a_directory_of_peft(
    inputs: Inputs, uninterrupted: Callable[[str], Path], tmp_path: Path, peft: ModuleType
) -> None:
    """With the model below it, it is the model that `--merge-adapters` writes."""
    actor = uninterrupted("dp2") / f"global_step_{STEPS}" / "actor"
    assert merge(actor, tmp_path / "peft") == 0 == merge(actor, tmp_path / "whole", "--merge-adapters")
    base = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float32)
    with torch.no_grad():
        before, theirs = base(IDS).logits, peft.PeftModel.from_pretrained(base, tmp_path / "peft")(IDS).logits
    torch.testing.assert_close(theirs, logits(tmp_path / "whole"), rtol=1e-5, atol=1e-5)
    assert (theirs - before).abs().max() > 1e-3
