"""Each algorithm learns the task of examples/arithmetic: final validation reward, and steps to 0.7, over several seeds.

python benchmarks/algorithms.py                                  # 5 algorithms x 3 seeds, hours on two cores
python benchmarks/algorithms.py --algorithms grpo rloo --seeds 0 # some of them
python benchmarks/algorithms.py --write-docs                     # and the table goes into benchmarks/README.md

One run after the other, as a user would start them: data, model and warm start once for each seed, then `scalerl train`
with the example's configuration and what ALGORITHMS changes. Each finished run leaves one JSON under --work and is not
run again; a run that was killed goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"
DOCS = record.REPOSITORY / "benchmarks" / "README.md"
BEGIN, END = "<!-- learning table: benchmarks/algorithms.py writes it -->", "<!-- end of the learning table -->"
RECIPES = record.REPOSITORY / "scalerl" / "configs" / "recipe"
VALIDATION = "val-core/arithmetic/add/reward/mean@1"
GOAL = 0.7
ACTOR = "actor_rollout_ref.actor"
# What differs from examples/arithmetic/grpo.yaml, which has groups of 8 and a KL term in the loss.
ALGORITHMS: dict[str, list[str]] = {
    "ppo": ["+recipe=ppo", "critic.optim.lr=1e-3"],
    "grpo": [],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "reinforce_plus_plus": ["algorithm.adv_estimator=reinforce_plus_plus"],
    # The example's own sizes in the place of the recipe's, which are for answers of 20480 tokens.
    "dapo": [
        "+recipe=dapo",
        *("data.max_prompt_length=16", "data.max_response_length=8", "data.train_batch_size=64"),
        *(f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.max_tokens_per_micro_batch=4096"),
        "actor_rollout_ref.rollout.n=8",
        "reward_model.overlong_buffer.len=2",
        f"{ACTOR}.use_kl_loss=false",
        # The policy soon answers most prompts right every time.
        "algorithm.filter_groups.max_num_gen_batches=3",
    ],
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=known())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="RL steps")
    parser.add_argument("--sft-steps", type=int, default=200, help="steps of the warm start")
    parser.add_argument("--test-freq", type=int, default=5, help="steps between validations")
    parser.add_argument("--rollout", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--work", type=Path, default=Path("outputs/algorithms"), help="of all runs; kept")
    parser.add_argument("--write-docs", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-algorithms.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def known() -> list[str]:
    """Those whose recipe is there."""
    recipes = {path.stem for path in RECIPES.glob("*.yaml")}
    return [name for name, overrides in ALGORITHMS.items() if recipes.issuperset(recipes_of(overrides))]


def recipes_of(overrides: Iterable[str]) -> list[str]:
    return [override.removeprefix("+recipe=") for override in overrides if override.startswith("+recipe=")]


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    work = options.work.resolve()
    runs = []
    for seed in options.seeds:
        for algorithm in options.algorithms:
            runs.append(one_run(options, work, algorithm, seed))
            print(f"{algorithm} seed {seed}: {show(runs[-1])}", flush=True)
    result = {"goal": GOAL, "algorithms": summarize(runs), "runs": runs}
    text = table(result["algorithms"])
    print(f"\n{text}")
    if options.write_docs:
        write_docs(DOCS, text)
    return record.keep("algorithms", arguments, vars(options) | {"work": str(options.work)}, ran_on, result)


def one_run(options: argparse.Namespace, work: Path, algorithm: str, seed: int) -> dict[str, Any]:
    """What the run's JSON says, after the run if there is none of the same settings."""
    directory = work / f"seed-{seed}"
    finished = directory / f"{algorithm}.json"
    settings = {
        "algorithm": algorithm,
        "seed": seed,
        "steps": options.steps,
        "sft_steps": options.sft_steps,
        "test_freq": options.test_freq,
        "rollout": options.rollout,
        "overrides": ALGORITHMS[algorithm],
    }
    if finished.exists():
        stored = json.loads(finished.read_text(encoding="utf-8"))
        if stored["settings"] == settings:
            return stored
        raise SystemExit(f"{finished} is of other settings ({stored['settings']}); give another --work, or delete it")
    start = warm_start(options, directory, seed)
    run_dir = directory / algorithm
    scalerl(directory / f"{algorithm}.log", "train", *train_overrides(options, start, run_dir, algorithm, seed))
    validations = read_validations(run_dir / "metrics.jsonl")
    run = {"settings": settings, "commit": record.commit(), "validations": validations, **outcome(validations)}
    write_atomically(finished, json.dumps(run, indent=2) + "\n")
    # Checkpoints and the tracker's file; metrics.jsonl and the log stay.
    for checkpoint in run_dir.glob("global_step_*"):
        shutil.rmtree(checkpoint)
    return run


def warm_start(options: argparse.Namespace, directory: Path, seed: int) -> Path:
    """directory, with data and a fine-tuned model in it: the same for all algorithms of a seed."""
    done, log = directory / "sft_model.done", directory / "sft.log"
    if done.exists() and done.read_text(encoding="utf-8") == str(options.sft_steps):
        return directory
    for name in ("data", "model", "sft", "sft_model"):
        shutil.rmtree(directory / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    for script, out in (("make_data.py", "data"), ("make_model.py", "model")):
        call(log, str(EXAMPLE / script), "--out", str(directory / out), "--seed", str(seed))
    scalerl(
        log,
        "sft",
        *("--config-dir", str(EXAMPLE), "--config-name", "sft"),
        f"data.train_files={directory}/data/sft_train.parquet",
        f"model.path={directory}/model",
        f"data.seed={seed}",
        f"trainer.total_training_steps={options.sft_steps}",
        f"trainer.save_freq={options.sft_steps}",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={directory}/sft",
    )
    checkpoint = directory / "sft" / f"global_step_{options.sft_steps}" / "actor"
    merge = ("--backend", "megatron", "--local_dir", str(checkpoint), "--target_dir", str(directory / "sft_model"))
    scalerl(log, "merge", *merge)
    write_atomically(done, str(options.sft_steps))
    return directory


def train_overrides(options: argparse.Namespace, start: Path, run_dir: Path, algorithm: str, seed: int) -> list[str]:
    return [
        *("--config-dir", str(EXAMPLE), "--config-name", "grpo"),
        f"data.train_files={start}/data/rl_train.parquet",
        f"data.val_files={start}/data/rl_val.parquet",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={start}/sft_model",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.rollout.name={options.rollout}",
        f"custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.total_training_steps={options.steps}",
        # 4 updates a step.
        f"actor_rollout_ref.actor.optim.lr_decay_updates={4 * options.steps}",
        f"trainer.test_freq={options.test_freq}",
        "trainer.logger=[console,file]",
        "trainer.log_val_generations=0",
        f"trainer.default_local_dir={run_dir}",
        *ALGORITHMS[algorithm],
    ]


def scalerl(log: Path, *arguments: str) -> None:
    call(log, "-m", "scalerl.cli", *arguments)


def call(log: Path, *arguments: str) -> None:
    """Its output goes to the end of log. Exits with the last words of a command that fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("a", encoding="utf-8") as out:
        done = subprocess.run([sys.executable, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments[:3])} ended with {done.returncode}; the end of {log}:\n"
            f"{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
        )


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


# results


def read_validations(metrics: Path) -> dict[str, float]:
    """Step -> validation reward; a step that a resume repeated counts once."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {str(line["step"]): line["data"][VALIDATION] for line in lines if VALIDATION in line.get("data", {})}


def outcome(validations: dict[str, float]) -> dict[str, Any]:
    """steps_to_goal: first validated step at which the reward is at least GOAL; None: none is."""
    steps = sorted(map(int, validations))
    reached = [step for step in steps if validations[str(step)] >= GOAL]
    return {
        "first": validations[str(steps[0])],
        "final": validations[str(steps[-1])],
        "steps_to_goal": min(reached, default=None),
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Algorithm -> over its seeds. steps_to_goal: median; None when a seed has not reached it."""
    summaries = {}
    for name in dict.fromkeys(run["settings"]["algorithm"] for run in runs):
        own = [run for run in runs if run["settings"]["algorithm"] == name]
        steps = [run["steps_to_goal"] for run in own]
        summaries[name] = {
            "num_seeds": len(own),
            "first": mean(run["first"] for run in own),
            "final": [run["final"] for run in own],
            "final_mean": mean(run["final"] for run in own),
            "steps_to_goal": steps,
            "steps_to_goal_median": None if None in steps else median(steps),
        }
    return summaries


def show(run: dict[str, Any]) -> str:
    reached = f"{GOAL} at step {run['steps_to_goal']}" if run["steps_to_goal"] is not None else f"{GOAL} not reached"
    return f"validation reward {run['first']:.3f} -> {run['final']:.3f}, {reached}"


def table(algorithms: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| algorithm | seeds | reward before | final reward, mean | of each seed "
        f"| steps to {GOAL}, median | of each seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in algorithms.items():
        finals = ", ".join(f"{value:.3f}" for value in row["final"])
        steps = ", ".join("-" if step is None else str(step) for step in row["steps_to_goal"])
        middle = "-" if row["steps_to_goal_median"] is None else f"{row['steps_to_goal_median']:g}"
        lines.append(
            f"| {name} | {row['num_seeds']} | {row['first']:.3f} | {row['final_mean']:.3f} | {finals} | {middle} | "
            f"{steps} |"
        )
    return "\n".join(lines)


def write_docs(path: Path, text: str) -> None:
    """Between the two marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path} has not the lines {BEGIN!r} and {END!r} between which the table goes")
    write_atomically(path, f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
