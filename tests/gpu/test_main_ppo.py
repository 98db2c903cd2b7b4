"""Steps of the main job on one GPU or two: bfloat16 trainer and SGLang server share the devices.

NOT RUN YET on a GPU: written on a machine without one, where the same command ran with trainer.device=cpu.

    python -m pytest tests/gpu/test_main_ppo.py -q
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.conftest import make_gpu_model

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "arithmetic"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Of p_trainer and p_sampler over sampled tokens: both compute in bfloat16, by different kernels, so each is off by some
# per cent of itself, while the probabilities range over orders of magnitude.
CORRELATION_BOUND = 0.99
TIMEOUT_S = 1200
# A random model never adds right: any reward that differs within a group moves the weights.
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


def overrides(model: Path, data: Path, run_dir: Path, device: str, steps: int) -> list[str]:
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
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={run_dir}",
    ]


def check_main_ppo(
    directory: Path,
    device: str,
    *more: str,
    steps: int = 2,
    meanwhile: Callable[[Path, Path], None] | None = None,
    under: Sequence[str] = (),
) -> list[dict[str, float]]:
    """meanwhile: is called with the directories of model and run once the job has been started.

    under: a command that the job is an argument of.
    """
    data, run_dir = directory / "data", directory / "run"
    make_data = [sys.executable, str(EXAMPLE / "make_data.py"), "--out", str(data)]
    subprocess.run(make_data, check=True, capture_output=True, timeout=120)
    (data / "reward.py").write_text(REWARD)
    model = make_gpu_model(directory / "model", seed=0)
    command = [*under, sys.executable, "-m", "scalerl.trainer.main_ppo"]
    command += [*overrides(model, data, run_dir, device, steps), *more]
    with (directory / "output").open("w") as output:
        job = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
        try:
            if meanwhile is not None:
                meanwhile(model, run_dir)
            code = job.wait(TIMEOUT_S)
        finally:
            # It ends what it has started.
            job.terminate()
            job.wait(60)
    assert code == 0, (directory / "output").read_text()[-6000:]
    # Step 0 is the validation before training.
    step_metrics = [line["data"] for line in logged(run_dir) if "timing_s/step" in line["data"]]
    assert [step["training/global_step"] for step in step_metrics] == list(range(1, steps + 1))
    for step in step_metrics:
        assert step["actor/num_updates"] == 2.0
        assert step["actor/grad_norm"] > 0
        assert step["perf/update_weights_gb"] > 0
        assert step["training/rollout_actor_probs_pearson_corr"] > CORRELATION_BOUND
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text().strip() == str(steps)
    assert (run_dir / f"global_step_{steps}" / "COMPLETE").exists()
    return step_metrics


def logged(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    # The last line may be half written.
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_the_server_after_step_1(model: Path, run_dir: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not any(line["step"] == 1 for line in logged(run_dir)):
        assert time.monotonic() < deadline, "no step 1"
        time.sleep(0.2)
    (server,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "scalerl.rollout.servers.sglang.launch" in (command := process.info["cmdline"] or [])
        and str(model) in command
    )
    server.kill()


def test_two_steps_on_one_gpu(tmp_path: Path) -> None:
    import torch

    from scalerl.models.flops import device_peak_flops

    steps = check_main_ppo(tmp_path, "cuda")
    if device_peak_flops(torch.cuda.get_device_name(), "bfloat16"):
        assert all(0 < step["perf/mfu/actor"] < 1 for step in steps)
    # The first three weight syncs are always compared by checksums; a difference would have ended the run.
    assert all(step["timing_s/update_weights/verify"] > 0 for step in steps)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_server_that_dies_comes_back_beside_the_trainer(tmp_path: Path, num_gpus: int) -> None:
    """In the memory that the trainer has left, with the same KV cache, and every sync verified."""
    import torch

    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"{num_gpus} GPUs")
    on_gpus = [f"trainer.n_gpus_per_node={num_gpus}", f"{ROLLOUT}.tensor_model_parallel_size={num_gpus}"]
    keys = [*on_gpus, f"{ROLLOUT}.verify_weights_every=1"]
    steps = check_main_ppo(tmp_path, "cuda", *keys, steps=4, meanwhile=kill_the_server_after_step_1)
    assert sum(step["rollout/num_restarts"] for step in steps) == 1
    assert all(step["timing_s/update_weights/verify"] > 0 for step in steps)


@pytest.fixture(autouse=True)
def _no_outer_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
