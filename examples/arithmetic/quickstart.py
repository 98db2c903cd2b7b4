"""The main job, whole: data, model, SFT, RL, merge, and a check of the result by transformers.

    python examples/arithmetic/quickstart.py [--out DIR] [--seed N] [--model qwen3|qwen3_5_moe_text|glm4_moe|gpt_oss]
                                             [--algorithm grpo|ppo|dapo] [--gpus N] [KEY=VALUE]

KEY=VALUE goes to `scalerl train`. --gpus takes GPUs in the place of the CPU. It runs the same commands that a user
types and prints each of them. Three to five minutes on two cores; a mixture (--model glm4_moe) takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
# For the transformers part; `scalerl` sets what its own processes need.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

ALGORITHMS = ("grpo", "ppo", "dapo")
VALIDATION = "val-core/arithmetic/add/reward/mean@1"
SCALERL = [sys.executable, "-m", "scalerl.cli"]


def main() -> int:
    arguments, overrides = parse()
    out, seed, algorithm = arguments.out.resolve(), arguments.seed, arguments.algorithm
    run_dir = out / algorithm
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)

    from make_data import make_data
    from make_model import make_model
    from score import score

    title("1. Data and an untrained model")
    data = make_data(out / "data", seed)
    model = make_model(out / "model", seed, arguments.model, head_dim=64 if arguments.gpus else 32)
    before_sft = score(model, data["val"])
    print(f"data in {out / 'data'}, model in {model}; it scores {before_sft:.3f}")

    title("2. Warm start: supervised fine-tuning")
    run("sft", "--config-dir", HERE, "--config-name", "sft", f"data.train_files={data['sft']}", f"model.path={model}",
        f"data.seed={seed}", f"trainer.default_local_dir={out / 'sft'}",
        *on_gpus(arguments.gpus, "megatron"))  # fmt: skip
    merge(out / "sft", out / "sft_model")

    title(f"3. Reinforcement learning: {algorithm.upper()}")
    run("train", "--config-dir", HERE, "--config-name", algorithm, f"data.train_files={data['train']}",
        f"data.val_files={data['val']}", f"data.seed={seed}", f"actor_rollout_ref.model.path={out / 'sft_model'}",
        f"actor_rollout_ref.rollout.seed={seed}", f"custom_reward_function.path={HERE / 'reward.py'}",
        f"trainer.default_local_dir={run_dir}",
        *on_gpus(arguments.gpus, "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"),
        *overrides)  # fmt: skip
    validations = read_validations(run_dir / "metrics.jsonl")

    title("4. Merge and check with transformers")
    # An adapter alone would be a directory of peft.
    has_adapter = any(override.startswith("actor_rollout_ref.model.lora_rank=") for override in overrides)
    merge(run_dir, out / "merged", *["--merge-adapters"] * has_adapter)
    merged = score(out / "merged", data["val"])
    print(f"transformers scores the merged model {merged:.4f}; the trainer's last validation was {validations[-1]:.4f}")

    scores = (before_sft, validations[0], merged)
    print(summary(run_dir, arguments.model, scores, time.monotonic() - started), flush=True)
    # bfloat16 and other kernels round otherwise than transformers does on the CPU.
    if not arguments.gpus and merged != validations[-1]:
        print("error: the merged model does not score what the trainer measured", file=sys.stderr)
        return 1
    return 0


def parse() -> tuple[argparse.Namespace, list[str]]:
    from make_model import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="made anew (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=FAMILIES, default="qwen3", help="model_type (default: %(default)s)")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="grpo", help="NAME.yaml beside this file")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="train and generate on N GPUs of this machine")
    return parser.parse_known_args()


def on_gpus(number: int, megatron: str, rollout: str | None = None) -> list[str]:
    """Overrides that take this many GPUs in the place of the CPU.  megatron, rollout: keys of the sections."""
    if not number:
        return []
    common = ["trainer.device=cuda", f"trainer.n_gpus_per_node={number}", f"{megatron}.dtype=bfloat16"]
    common.append(f"{megatron}.tensor_model_parallel_size={min(number, 2)}")
    return common + ([f"{rollout}.dtype=bfloat16", f"{rollout}.num_replicas=null"] if rollout else [])


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*command: object) -> None:
    """One `scalerl` command, shown as a user would type it; ends this program with its exit code when it fails."""
    words = [str(word) for word in command]
    print(f"$ scalerl {shlex.join(words)}", flush=True)
    done = subprocess.run([*SCALERL, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def merge(run_dir: Path, target: Path, *more: str) -> None:
    step = (run_dir / "latest_checkpointed_iteration.txt").read_text().strip()
    actor = run_dir / f"global_step_{step}" / "actor"
    run("merge", "--backend", "megatron", "--local_dir", actor, "--target_dir", target, *more)


def read_validations(metrics: Path, name: str = VALIDATION) -> list[float]:
    """The values of a metric, in the order of the steps that have it."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["data"][name] for record in records if name in record.get("data", {})]


def summary(run_dir: Path, model: str, scores: tuple[float, float, float], seconds: float) -> str:
    """The last lines.  scores: of validations before SFT, after it, after RL."""
    from mlflow import MlflowClient

    from scalerl.tracking.mlflow_names import LOCAL_ADDRESS, charts_page

    out, algorithm = run_dir.parent, run_dir.name
    uri = f"sqlite:///{run_dir / 'mlflow.db'}"
    client = MlflowClient(uri)
    (mlflow_run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    before_sft, after_sft, after_rl = scores
    again = f"--gpus 8 --algorithm {algorithm}" + (f" --model {model}" if model != "qwen3" else "")
    page = charts_page(LOCAL_ADDRESS, mlflow_run.info.experiment_id, mlflow_run.info.run_id)
    return f"""
== Done in {seconds:.0f} s
validation score     before SFT {before_sft:.3f}    after SFT {after_sft:.3f}    after RL {after_rl:.3f}
merged model         {out / "merged"}
open the run         {Path(sys.executable).parent / "mlflow"} ui --backend-store-uri {uri}
  and in a browser   {page}
the same on 8 GPUs   {sys.executable} {HERE / "quickstart.py"} {again} \\
                       --out {out.parent / f"{out.name}_8gpu"}"""


if __name__ == "__main__":
    sys.exit(main())
