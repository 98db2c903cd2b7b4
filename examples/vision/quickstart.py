"""Naming what drawn pictures show, whole: data, a vision-language model, SFT, RL, merge, and a check by transformers.

    python examples/vision/quickstart.py [--out DIR] [--seed N] [--model qwen2_5_vl|qwen3_vl|qwen3_5] [KEY=VALUE]

KEY=VALUE goes to `scalerl train`. It runs the same commands that a user types and prints each of them.
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

SCALERL = [sys.executable, "-m", "scalerl.cli"]
# By data source, the metric of the validation.
VALIDATIONS = {name: f"val-core/vision/{name}/reward/mean@1" for name in ("name", "blank")}


def main() -> int:
    arguments, overrides = parse()
    out, seed = arguments.out.resolve(), arguments.seed
    run_dir = out / "grpo"
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)

    from make_data import make_data
    from make_model import make_model
    from score import score

    title("1. Data and an untrained model")
    data = make_data(out / "data", seed)
    model = make_model(out / "model", seed, arguments.model)
    print(f"data in {out / 'data'}, model in {model}")

    title("2. Warm start: supervised fine-tuning")
    run("sft", "--config-dir", HERE, "--config-name", "sft", f"data.train_files={data['sft']}", f"model.path={model}",
        f"data.seed={seed}", f"trainer.default_local_dir={out / 'sft'}")  # fmt: skip
    merge(out / "sft", out / "sft_model")

    title("3. Reinforcement learning: GRPO")
    run("train", "--config-dir", HERE, "--config-name", "grpo", f"data.train_files={data['train']}",
        f"data.val_files=[{data['val']},{data['blank']}]", f"data.seed={seed}",
        f"actor_rollout_ref.model.path={out / 'sft_model'}", f"actor_rollout_ref.rollout.seed={seed}",
        f"custom_reward_function.path={HERE / 'reward.py'}", f"trainer.default_local_dir={run_dir}",
        *overrides)  # fmt: skip
    validations = {name: read_metric(run_dir / "metrics.jsonl", metric) for name, metric in VALIDATIONS.items()}

    title("4. Merge and check with transformers")
    merge(run_dir, out / "merged")
    merged = score(out / "merged", data["val"])
    last = validations["name"][-1]
    print(f"transformers scores the merged model {merged:.4f}; the trainer's last validation was {last:.4f}")
    print(
        f"""
== Done in {time.monotonic() - started:.0f} s
validation score     after SFT {validations["name"][0]:.3f}    after RL {merged:.3f}
without its pictures after SFT {validations["blank"][0]:.3f}    after RL {validations["blank"][-1]:.3f}
merged model         {out / "merged"}""",
        flush=True,
    )
    if merged != last:
        print("error: the merged model does not score what the trainer measured", file=sys.stderr)
        return 1
    return 0


def parse() -> tuple[argparse.Namespace, list[str]]:
    from make_model import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/vision"), help="made anew (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=FAMILIES, default="qwen2_5_vl", help="model_type (default: %(default)s)")
    return parser.parse_known_args()


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*command: object) -> None:
    """One `scalerl` command, shown as a user would type it; ends this program with its exit code when it fails."""
    words = [str(word) for word in command]
    print(f"$ scalerl {shlex.join(words)}", flush=True)
    done = subprocess.run([*SCALERL, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def merge(run_dir: Path, target: Path) -> None:
    step = (run_dir / "latest_checkpointed_iteration.txt").read_text().strip()
    actor = run_dir / f"global_step_{step}" / "actor"
    run("merge", "--backend", "megatron", "--local_dir", actor, "--target_dir", target)


def read_metric(metrics: Path, name: str) -> list[float]:
    """The values of a metric, in the order of the steps that have it."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["data"][name] for record in records if name in record.get("data", {})]


if __name__ == "__main__":
    sys.exit(main())
