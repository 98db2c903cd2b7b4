"""The whole GRPO step against TRL's GRPOTrainer: tokens per second, processor time, and where scalerl's time goes.

python -m venv TRL && TRL/bin/pip install torch==2.13.0 && TRL/bin/pip install trl      # an environment of its own
python benchmarks/vs_trl.py --trl TRL/bin/python                                        # both sides, in turn
python benchmarks/vs_trl.py --trl TRL/bin/python --timeline                             # and which process works when

Both train the same 0.8-million-parameter Qwen3 in float32 on examples/arithmetic: 64 prompts x 8 samples x at most 32
tokens, the same reward function, one update a step, no KL. Each side runs as its users run it: TRL in one process with
--cores threads, scalerl with --cores ranks and as many rollout servers. Rounds alternate (scalerl, TRL, scalerl,
TRL...), so that what else the machine does meets both. A step is all that is between the ends of two steps. Processor
time is that of the process tree: on a machine with other load it says more than seconds. The timeline is of one more
run of scalerl, whose processes are looked at all the time, which takes a part of a core.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"
HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1800.0
LOOK_S = 0.02
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# 0.8 million parameters.
LAYERS, HIDDEN, FFN = 4, 128, 384
# Phases of a step in their order; what is left of it comes after them.
PHASES = ("gen", "balance", "adv", "update_actor", "update_weights")
# Processes of a run, by their command.
PROCESSES = {
    "trainer ranks": r"^ray::.*RankProcess",
    "rollout workers": r"^ray::.*RolloutWorker",
    "server hosts": r"^ray::.*ServerHost",
    "servers: scheduler and model": r"^sglang::scheduler",
    "servers: detokenizer": r"^sglang::detokenizer",
    "servers: HTTP and tokenizer": r"scalerl\.rollout\.servers\.sglang\.launch",
    "servers": r"scalerl\.rollout\.servers\.embedded\.server",
    "Ray's own": r"raylet|gcs_server|/ray/|^ray::",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, help="Python of an environment that has TRL")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of a response")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="of both sides")
    parser.add_argument("--cores", type=int, default=2, help="threads of TRL, ranks of scalerl")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens of a micro-batch of scalerl, at most")
    parser.add_argument("--trl-micro-batches", type=int, default=1, help="of an update of TRL")
    parser.add_argument("--timeline", action="store_true", help="one more run, of which processor time is told")
    parser.add_argument("--rollout", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-vs-trl-cpu.json")
    parser.add_argument("overrides", nargs="*", help="after --: any key of `scalerl train`")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    ran_on = record.machine("cpu", now=options.now)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        num_parameters = make_inputs(options, directory)
        sides: dict[str, list[dict[str, float]]] = {"scalerl": [], "trl": []}
        for number in range(options.rounds):
            sides["scalerl"] += run_scalerl(options, directory, directory / f"run-{number}")
            sides["trl"] += run_trl(options, directory)
        timeline = run_timeline(options, directory, directory / "run-timeline") if options.timeline else None
    result = {"num_parameters": num_parameters, "trl_versions": trl_versions(options.trl)} | summarize(sides)
    if timeline is not None:
        result["timeline"] = timeline
    print(report(result))
    return record.keep("vs_trl", arguments, vars(options), ran_on, result, device="cpu")


def make_inputs(options: argparse.Namespace, directory: Path) -> int:
    """model/, rl_train.parquet and, of the same rows, prompts.jsonl. -> parameters of the model."""
    sys.path.insert(0, str(EXAMPLE))
    import pyarrow.parquet as pq
    import torch
    from make_data import make_data
    from make_model import VOCAB_SIZE, make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    rows = pq.read_table(make_data(directory, seed=0)["train"]).to_pylist()
    lines = [
        json.dumps({"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]}) + "\n" for row in rows
    ]
    (directory / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


# --- the two sides: of each timed step wall_s, cpu_s and tokens ---


def run_scalerl(options: argparse.Namespace, directory: Path, run_dir: Path) -> list[dict[str, float]]:
    """Processor seconds are read when a step's line comes: a step's end, to within LOOK_S.

    The last step is not used: processes end right after it.
    """
    read_at: list[float] = []

    def look(root: Any, num_lines: int) -> None:
        if num_lines > len(read_at):
            read_at.append(sum(processor_seconds(root).values()))

    lines = watch_scalerl(options, directory, run_dir, look)
    steps = []
    for at in range(1, min(len(lines) - 1, len(read_at))):
        data = lines[at]["data"]
        if lines[at]["step"] > options.warmup and "timing_s/step" in data:
            phases = {key: value for key, value in data.items() if key.startswith("timing_s/")}
            steps.append(
                {
                    "wall_s": data["timing_s/step"],
                    "cpu_s": read_at[at] - read_at[at - 1],
                    "tokens": data["perf/total_num_tokens"],
                    **phases,
                }
            )
    return steps


def run_timeline(options: argparse.Namespace, directory: Path, run_dir: Path) -> dict[str, dict[str, float]]:
    """Seconds of each phase of a step ("wall_s"), and of it each kind of processes' processor seconds: medians."""
    looks: list[tuple[float, dict[str, float]]] = []
    ends: list[float] = []

    def look(root: Any, num_lines: int) -> None:
        looks.append((time.monotonic(), processor_seconds(root)))
        ends.extend([looks[-1][0]] * (num_lines - len(ends)))

    lines = watch_scalerl(options, directory, run_dir, look)
    steps: dict[str, list[dict[str, float]]] = {}
    for line, end in zip(lines[:-1], ends, strict=False):
        data = line["data"]
        if line["step"] <= options.warmup or "timing_s/step" not in data:
            continue
        begin = end - data["timing_s/step"]
        for phase in (*PHASES, "rest"):
            until = end if phase == "rest" else begin + data.get(f"timing_s/{phase}", 0.0)
            at_begin, at_end = totals_at(looks, begin), totals_at(looks, until)
            took = {name: seconds - at_begin.get(name, 0.0) for name, seconds in at_end.items()}
            steps.setdefault(phase, []).append({"wall_s": until - begin, **took})
            begin = until
    return {
        phase: {
            name: round(median(one.get(name, 0.0) for one in of_phase), 4)
            for name in ("wall_s", *PROCESSES, "driver", "others")
        }
        for phase, of_phase in steps.items()
    }


def totals_at(looks: list[tuple[float, dict[str, float]]], when: float) -> dict[str, float]:
    """Processor seconds by kind of process at a time, between two looks by their line."""
    place = bisect.bisect_left(looks, when, key=itemgetter(0))
    if place in (0, len(looks)):
        return looks[min(place, len(looks) - 1)][1]
    (before_s, before), (after_s, after) = looks[place - 1 : place + 1]
    share = (when - before_s) / (after_s - before_s)
    return {name: before.get(name, 0.0) * (1 - share) + seconds * share for name, seconds in after.items()}


def watch_scalerl(
    options: argparse.Namespace, directory: Path, run_dir: Path, look: Callable[[Any, int], None]
) -> list[dict[str, Any]]:
    """Runs scalerl, and calls look(its process, lines of metrics) all LOOK_S. -> the lines."""
    import psutil

    command = [sys.executable, "-m", "scalerl.trainer.main_ppo", *overrides(options, directory, run_dir)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = run_dir.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment, cwd=directory, stdout=output, stderr=output)
    root, metrics = psutil.Process(process.pid), run_dir / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        look(root, metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
        time.sleep(LOOK_S)
    if process.poll() != 0:
        process.kill()
        raise SystemExit(f"scalerl ended with {process.poll()}:\n{log.read_text()[-3000:]}")
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def processor_seconds(root: Any) -> dict[str, float]:
    """Of a process and all below it, by what they are."""
    import psutil

    totals: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            what = "driver" if process == root else kind_of(process)
        except psutil.Error:
            continue
        totals[what] = totals.get(what, 0.0) + times.user + times.system
    return totals


def kind_of(process: Any) -> str:
    """Of a process below the driver."""
    command = " ".join(process.cmdline())
    return next((what for what, pattern in PROCESSES.items() if re.search(pattern, command)), "others")


def overrides(options: argparse.Namespace, directory: Path, run_dir: Path) -> list[str]:
    return [
        *("--config-dir", str(EXAMPLE), "--config-name", "grpo"),
        f"data.train_files={directory}/rl_train.parquet",
        f"data.val_files={directory}/rl_val.parquet",
        f"data.train_batch_size={options.prompts}",
        f"data.max_response_length={options.max_tokens}",
        f"actor_rollout_ref.model.path={directory}/model",
        f"{ACTOR}.ppo_mini_batch_size={options.prompts}",
        f"{ACTOR}.max_tokens_per_micro_batch={options.micro_batch}",
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.optim.min_lr=0",
        f"{ACTOR}.megatron.tensor_model_parallel_size=1",
        f"{ROLLOUT}.name={options.rollout}",
        # A server on each device.
        f"{ROLLOUT}.num_replicas=null",
        f"{ROLLOUT}.n={options.n}",
        f"{ROLLOUT}.max_num_seqs={options.prompts * options.n}",
        f"custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.n_gpus_per_node={options.cores}",
        f"trainer.total_training_steps={options.warmup + options.steps + 1}",
        *("trainer.test_freq=-1", "trainer.save_freq=0", "trainer.val_before_train=false"),
        *("trainer.log_val_generations=0", "trainer.logger=[file]", "trainer.resume_mode=disable"),
        f"trainer.default_local_dir={run_dir}",
        *options.overrides,
    ]


def run_trl(options: argparse.Namespace, directory: Path) -> list[dict[str, float]]:
    # It runs in another directory.
    command = [os.path.abspath(options.trl), str(HERE / "trl_grpo.py"), "--directory", str(directory)]
    command += ["--reward", str(EXAMPLE / "reward.py"), "--threads", str(options.cores)]
    command += ["--micro-batches", str(options.trl_micro_batches)]
    for name in ("prompts", "n", "max_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--steps", str(options.warmup + options.steps)]
    # Nothing of this environment reaches the other one.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(options.cores), "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in environment.items() if name not in ("MKL_NUM_THREADS",)}
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (directory / "trl.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if line["step"] > options.warmup]
    return [{name: line[name] for name in ("wall_s", "cpu_s", "tokens")} for line in timed]


def trl_versions(python: str) -> dict[str, str]:
    program = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in ('trl', 'torch', 'transformers')}))"
    )
    return json.loads(subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout)


# --- summary ---


def summarize(sides: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for side, steps in sides.items():
        summary[side] = {
            "num_steps": len(steps),
            "tokens_per_step": record.spread([step["tokens"] for step in steps]),
            "step_s": record.spread([step["wall_s"] for step in steps]),
            "cpu_s": record.spread([step["cpu_s"] for step in steps]),
            "tokens_per_s": record.spread([step["tokens"] / step["wall_s"] for step in steps]),
            "tokens_per_cpu_s": record.spread([step["tokens"] / step["cpu_s"] for step in steps]),
        }
    ours = sides["scalerl"]
    names = sorted({key for step in ours for key in step if key.startswith("timing_s/")} - {"timing_s/step"})
    summary["scalerl"]["share_of_step"] = {
        name.removeprefix("timing_s/"): median(step.get(name, 0.0) / step["wall_s"] for step in ours) for name in names
    }
    for name in ("tokens_per_s", "tokens_per_cpu_s"):
        summary[f"ratio_{name}"] = summary["scalerl"][name]["median"] / summary["trl"][name]["median"]
    return summary


def report(result: dict[str, Any]) -> str:
    lines = [f"{'':<26}{'scalerl':>12}{'TRL':>12}{'ratio':>8}"]
    for name in ("tokens_per_step", "step_s", "cpu_s", "tokens_per_s", "tokens_per_cpu_s"):
        ours, theirs = (result[side][name]["median"] for side in ("scalerl", "trl"))
        lines.append(f"{name:<26}{ours:>12.2f}{theirs:>12.2f}{ours / theirs:>8.2f}")
    shares = result["scalerl"]["share_of_step"]
    lines += ["share of scalerl's step:"]
    lines += [f"  {name:<32}{share:>6.1%}" for name, share in shares.items() if share >= 0.005]
    for phase, took in result.get("timeline", {}).items():
        parts = ", ".join(
            f"{name} {seconds:.2f}" for name, seconds in took.items() if name != "wall_s" and seconds > 0.005
        )
        lines.append(f"{phase} {took['wall_s']:.3f} s, processor seconds: {parts}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
