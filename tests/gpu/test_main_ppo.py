"""Two steps of the main job on one GPU: bfloat16 trainer and SGLang server share the device.

NOT RUN YET on a GPU: written on a machine without one, where the same command ran with trainer.device=cpu.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import make_gpu_model

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "arithmetic"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Of p_trainer and p_sampler over sampled tokens: both compute in bfloat16, by different kernels, so each is off by some
# per cent of itself, while the probabilities range over orders of magnitude.
CORRELATION_BOUND = 0.99
# A random model never adds right: any reward that differs within a group moves the weights.
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


def overrides(model: Path, data: Path, run_dir: Path, device: str) -> list[str]:
    return [
        "+recipe=grpo",
        f"data.train_files={data}/rl_train.parquet",
        f"data.val_files={data}/rl_val.parquet",
        "data.val_max_samples=8",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={model}",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.max_tokens_per_micro_batch=1024",
        f"{ACTOR}.optim.lr=1e-4",
        f"{ACTOR}.megatron.dtype=bfloat16",
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.max_num_seqs=32",
        f"custom_reward_function.path={data}/reward.py",
        f"trainer.device={device}",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={run_dir}",
    ]


def check_main_ppo(directory: Path, device: str) -> list[dict[str, float]]:
    data, run_dir = directory / "data", directory / "run"
    make_data = [sys.executable, str(EXAMPLE / "make_data.py"), "--out", str(data)]
    subprocess.run(make_data, check=True, capture_output=True, timeout=120)
    (data / "reward.py").write_text(REWARD)
    model = make_gpu_model(directory / "model", seed=0)
    done = subprocess.run(
        [sys.executable, "-m", "scalerl.trainer.main_ppo", *overrides(model, data, run_dir, device)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Step 0 is the validation before training.
    steps = [line["data"] for line in lines if "timing_s/step" in line["data"]]
    assert [step["training/global_step"] for step in steps] == [1.0, 2.0]
    for step in steps:
        assert step["actor/num_updates"] == 2.0
        assert step["actor/grad_norm"] > 0
        assert step["perf/update_weights_gb"] > 0
        assert step["training/rollout_actor_probs_pearson_corr"] > CORRELATION_BOUND
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert (run_dir / "global_step_2" / "COMPLETE").exists()
    return steps


def test_two_steps_on_one_gpu(tmp_path: Path) -> None:
    import torch

    from scalerl.metrics import device_peak_flops

    steps = check_main_ppo(tmp_path, "cuda")
    if device_peak_flops(torch.cuda.get_device_name(), "bfloat16"):
        assert all(0 < step["perf/mfu/actor"] < 1 for step in steps)
    # The first three weight syncs are always compared by checksums; a difference would have ended the run.
    assert all(step["timing_s/update_weights/verify"] > 0 for step in steps)


@pytest.fixture(autouse=True)
def _no_outer_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
