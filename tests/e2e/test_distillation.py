"""A teacher in the run's own processes and one that `scalerl serve` serves teach the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scalerl.commands.serve import API_KEY, build_parser, serving
from scalerl.rollout.servers.process import free_port
from tests.e2e.jobs import Inputs, Record
from tests.e2e.kept import Kept

KEY = "a-secret-that-no-file-has"
CONTEXT = 128
DISTILL = [
    "algorithm.adv_estimator=on_policy_distillation",
    "algorithm.distillation_top_k=8",
    "algorithm.distillation_coef=0.5",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=0",
]
# Of the update that follows from one pass of the teacher.
SAME = ("actor/distillation_loss", "actor/loss", "actor/pg_loss", "actor/grad_norm", "critic/advantages/mean")


@pytest.fixture(scope="module")
def teacher(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's model with other weights."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(inputs.model, path)
    generator = torch.Generator().manual_seed(5)
    file = path / "model.safetensors"
    tensors = {name: x + 0.05 * torch.randn(x.shape, generator=generator) for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def steps_of(kept: Kept, inputs: Inputs, run_dir: Path, *keys: str) -> dict[int, dict[str, float]]:
    finished = kept.train(inputs.overrides(run_dir, *DISTILL, *keys))
    assert finished.code == 0, finished.tail()
    return Record.read(run_dir).final


@pytest.mark.full
@pytest.mark.sglang
def test_a_served_teacher_and_one_in_the_ranks(
    inputs: Inputs, kept: Kept, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = steps_of(kept, inputs, tmp_path / "here", f"actor_rollout_ref.ref.model_path={teacher}")
    monkeypatch.setenv(API_KEY, KEY)
    port = free_port("127.0.0.1")
    command = [str(teacher), "--port", str(port), "--device", "cpu", "--context", str(CONTEXT)]
    with serving(build_parser().parse_args(command)):
        keys = [f"actor_rollout_ref.ref.url=http://127.0.0.1:{port}", f"actor_rollout_ref.ref.api_key_env={API_KEY}"]
        served = steps_of(kept, inputs, tmp_path / "served", *keys, "actor_rollout_ref.rollout.temperature=1")
    assert served.keys() == here.keys() and here[1]["actor/distillation_loss"] > 0.01
    for name in SAME:
        assert served[1][name] == pytest.approx(here[1][name], rel=1e-5, abs=1e-6), name
    # Later steps follow from updates, in which rounding grows.
    assert served[2]["actor/distillation_loss"] == pytest.approx(here[2]["actor/distillation_loss"], rel=1e-2)
    assert "perf/memory_peak_gb/ref" in here[1] and "perf/memory_peak_gb/ref" not in served[1]
    files = [path for path in (tmp_path / "served").rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
