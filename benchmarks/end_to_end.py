"""Seconds by phase and tokens per second of the whole RL step, with the limits of the machine beside them.

python benchmarks/end_to_end.py                                   # CPU: 2 ranks (tp 2) and one SGLang server
python benchmarks/end_to_end.py --model 0.6b --prompts 32 -- data.max_response_length=256       # one GPU, bfloat16
python benchmarks/end_to_end.py -- actor_rollout_ref.model.path=MODEL data.max_response_length=512   # any override

Runs the trainer as a user does (`python -m scalerl.trainer.main_ppo`) on examples/arithmetic, from an untrained model,
and reads its metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
from limits import copy_bytes_per_s, matmul_flops
from updates import MODELS, make_model

EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"
TIMEOUT_S = 3600.0
CORRELATION = "training/rollout_actor_probs_pearson_corr"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def parse(arguments: list[str], device: str) -> argparse.Namespace:
    on_cpu = device == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="random weights, and responses that end at their limit")
    parser.add_argument("--steps", type=int, default=10, help="timed RL steps")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--mini-batch", type=int, default=16, help="prompts of an optimizer update")
    parser.add_argument("--n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--world", type=int, default=2 if on_cpu else 1, help="trainer ranks; on CPU processes")
    parser.add_argument("--tp", type=int, default=2 if on_cpu else 1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rollout", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--ceiling-s", type=float, default=2.0, help="seconds for the matmul ceiling")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-end-to-end-DEVICE.json")
    parser.add_argument("overrides", nargs="*", help="after --: any key of `scalerl train`")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parse(arguments, device)
    # Before anything of ours makes load.
    ran_on = record.machine(device, now=options.now)

    def ceiling() -> float:
        return sum(matmul_flops(options.world, device, options.dtype, options.ceiling_s))

    # Before and after the trainer holds the machine: another process in the way can only make it smaller.
    ceiling_before = ceiling()
    with tempfile.TemporaryDirectory() as directory:
        run_trainer(options, device, Path(directory))
        config = read_config(Path(directory) / "run")
        steps = read_steps(Path(directory) / "run", options.warmup)
        flops = flops_of(config["actor_rollout_ref"]["model"]["path"])
    sync_bytes = steps[0]["perf/update_weights_gb"] * 1e9
    highest = max(ceiling_before, ceiling())
    result = summarize(steps, config, flops, highest, copy_bytes_per_s(int(sync_bytes), device))
    print(report(options, device, result))
    return record.keep("end_to_end", arguments, vars(options), ran_on, result, device=device)


# the run


def run_trainer(options: argparse.Namespace, device: str, directory: Path) -> None:
    """Leaves metrics.jsonl and config.yaml in directory/run. Exits with the trainer's last words when it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})

    def run(*command: str) -> None:
        call = [sys.executable, *command]
        done = subprocess.run(call, env=environment, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[:2])} ended with {done.returncode}:\n{done.stderr[-3000:]}")

    run(str(EXAMPLE / "make_data.py"), "--out", str(directory))
    run(str(EXAMPLE / "make_model.py"), "--out", str(directory / "model"))
    if options.model:
        make_model(str(directory / "model"), MODELS[options.model], options.dtype, 2048, device, 0)
    run("-m", "scalerl.trainer.main_ppo", *trainer_overrides(options, device, directory))


def trainer_overrides(options: argparse.Namespace, device: str, directory: Path) -> list[str]:
    return [
        *("--config-dir", str(EXAMPLE), "--config-name", "grpo"),
        f"data.train_files={directory}/rl_train.parquet",
        f"data.val_files={directory}/rl_val.parquet",
        f"data.train_batch_size={options.prompts}",
        f"actor_rollout_ref.model.path={directory}/model",
        f"{ACTOR}.ppo_mini_batch_size={options.mini_batch}",
        f"{ACTOR}.megatron.tensor_model_parallel_size={options.tp}",
        f"{ACTOR}.megatron.pipeline_model_parallel_size={options.pp}",
        f"{ACTOR}.megatron.dtype={options.dtype}",
        f"{ROLLOUT}.name={options.rollout}",
        f"{ROLLOUT}.n={options.n}",
        f"{ROLLOUT}.dtype={options.dtype}",
        f"{ROLLOUT}.ignore_eos={str(options.model is not None).lower()}",
        f"custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.device={device}",
        f"trainer.n_gpus_per_node={options.world}",
        f"trainer.total_training_steps={options.warmup + options.steps}",
        # Phases of their own that are not in every step.
        *("trainer.test_freq=-1", "trainer.save_freq=0", "trainer.val_before_train=false"),
        *("trainer.log_val_generations=0", "trainer.logger=[file]", "trainer.resume_mode=disable"),
        f"trainer.default_local_dir={directory}/run",
        *options.overrides,
    ]


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration: overrides may have changed anything."""
    import yaml

    return yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))


def read_steps(run_dir: Path, warmup: int) -> list[dict[str, float]]:
    """Metrics of the steps after the warm-up."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["data"] for line in lines if line["step"] > warmup and "timing_s/step" in line["data"]]


def flops_of(model_path: str) -> Any:
    from scalerl.models import ModelShape
    from scalerl.trainer.build import flops_shape

    return flops_shape(ModelShape.from_hf(model_path))


# summary


def summarize(
    steps: list[dict[str, float]], config: dict[str, Any], flops: Any, ceiling: float, copy_rate: float
) -> dict[str, Any]:
    """ceiling: matmul FLOP/s of all ranks.  copy_rate: bytes/s.

    The update's FLOPs take every sample at the step's mean length: exact for the weights, below the truth for attention
    (per mille of the whole where sequences are short).
    """
    phases = sorted({key.removeprefix("timing_s/") for step in steps for key in step if key.startswith("timing_s/")})
    seconds = {name: record.spread([step.get(f"timing_s/{name}", 0.0) for step in steps]) for name in phases}
    step_s = seconds["step"]["median"]
    num_samples = config["data"]["train_batch_size"] * config["actor_rollout_ref"]["rollout"]["n"]
    tokens = [step["perf/total_num_tokens"] for step in steps]
    response_tokens = [step["response_length/mean"] * num_samples for step in steps]
    epochs = config["actor_rollout_ref"]["actor"]["ppo_epochs"]
    update_flops = [num_samples * flops.train([round(count / num_samples)]) * epochs for count in tokens]
    gigabytes = steps[0]["perf/update_weights_gb"]
    send = "update_weights/send"
    return {
        "num_steps": len(steps),
        "num_samples_per_step": num_samples,
        "tokens_per_step": record.spread(tokens),
        "seconds": seconds,
        "share_of_step": {name: value["median"] / step_s for name, value in seconds.items() if "/" not in name},
        "tokens_per_s": _rate(tokens, steps, "step"),
        "rollout_tokens_per_s": _rate(response_tokens, steps, "gen"),
        "update_tokens_per_s": _rate(tokens, steps, "update_actor"),
        # Of the sampler's and the trainer's probabilities of the same tokens.
        "probability_correlation": record.spread([step[CORRELATION] for step in steps]),
        "weight_sync_gb": gigabytes,
        "weight_sync_gb_per_s": gigabytes / seconds[send]["median"],
        "limits": {
            "matmul_ceiling_flops_per_s": ceiling,
            "copy_gb_per_s": copy_rate / 1e9,
            "update_actor_s": record.spread(update_flops)["median"] / ceiling,
            "update_weights_s": gigabytes * 1e9 / copy_rate,
        },
        "update_mfu": record.spread(
            [count / step["timing_s/update_actor"] / ceiling for count, step in zip(update_flops, steps, strict=True)]
        )["median"],
    }


def _rate(counts: list[float], steps: list[dict[str, float]], phase: str) -> float:
    return record.spread([n / step[f"timing_s/{phase}"] for n, step in zip(counts, steps, strict=True)])["median"]


def report(options: argparse.Namespace, device: str, result: dict[str, Any]) -> str:
    limits, seconds = result["limits"], result["seconds"]
    notes = {
        "gen": f"{result['rollout_tokens_per_s']:.0f} response tokens/s, rewards included",
        "update_actor": f"{result['update_tokens_per_s']:.0f} tokens/s; at the matmul ceiling "
        f"{limits['update_actor_s']:.4f} s (MFU {result['update_mfu']:.3f})",
        "update_weights/send": f"{result['weight_sync_gb_per_s']:.4f} GB/s; one copy of the bytes "
        f"{limits['update_weights_s']:.6f} s",
        "step": f"{result['tokens_per_s']:.0f} tokens/s, prompt and response",
    }
    ordered = sorted(result["share_of_step"], key=lambda name: -seconds[name]["median"])
    rows = [("phase", "seconds", "share  min to max")]
    for name in ordered:
        for part in [name, *(sub for sub in seconds if sub.startswith(f"{name}/"))]:
            spread = seconds[part]
            share = f"{spread['median'] / seconds['step']['median']:5.2f}"
            note = f"{share}  {spread['min']:.3f} to {spread['max']:.3f}  {notes.get(part, '')}"
            rows.append(("  " * part.count("/") + part, f"{spread['median']:.3f}", note))
    head = (
        f"{result['num_steps']} steps of {result['num_samples_per_step']} samples, "
        f"{result['tokens_per_step']['median']:.0f} tokens; {options.world} ranks ({device}), {options.rollout}; "
        f"medians"
    )
    ceiling = f"matmul ceiling of all ranks {limits['matmul_ceiling_flops_per_s'] / 1e9:.1f} GFLOP/s, "
    return "\n".join([head, ceiling + f"copy {limits['copy_gb_per_s']:.2f} GB/s", "", record.table(rows)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
