"""SIGKILL of a whole training job again and again, and the same command after each: is the run the same in the end?

python benchmarks/chaos.py                                     # 100 kills, embedded engine, one rank
python benchmarks/chaos.py --engine sglang
python benchmarks/chaos.py --layout tp2 --critic
python benchmarks/chaos.py --async-save --minutes 30

One run is left alone. The other is killed --kills times, every process of the job at once, at moments that --seed
chooses: each phase of a step, the start, the writing, commit and removal of checkpoints, somewhere within its usual
length; what was missed, as a commit of 2 ms, is tried more often. Afterwards it goes on to its end, and must be the run
that was left alone: steps, samples, weights, optimizer, random states, state of the run, MLflow's history, bit for bit,
and in every line that any of the processes logged. With SGLang, whose sampler has no state that could be saved: steps,
prompts, learning rates, state of the run.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

LAYOUTS = {
    "one": ["trainer.n_gpus_per_node=1"],
    "dp2": ["trainer.n_gpus_per_node=2"],
    "tp2": ["trainer.n_gpus_per_node=2", "+layout=tp2"],
    "pp2": ["trainer.n_gpus_per_node=2", "+layout=pp2"],
}
# The weight of the KL moves from step to step, and so belongs to the state of the run.
CRITIC = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl={type:adaptive,kl_coef:0.1,horizon:100,target_kl:0.1}",
]
EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="one", help="of the ranks; default: one rank")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic and a KL in the reward; else GRPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="of the run; default: one for each kill, and 10")
    parser.add_argument("--async-save", action="store_true", help="trainer.async_save=true")
    parser.add_argument("--minutes", type=float, default=None, help="after these no further kill")
    parser.add_argument("--directory", default=None, help="where the runs are; default: for temporary files, removed")
    parser.add_argument("--out", help="result file; default benchmarks/results/DATE-chaos-ENGINE-cpu.json")
    record.add_now(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    ran_on = record.machine("cpu", now=args.now)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(args.directory or name)
        result = run(args, directory)
    record.keep(f"chaos_{args.engine}", arguments, vars(args), ran_on, result, device="cpu")
    return 0 if not result["differences"] else 1


def run(args: argparse.Namespace, directory: Path) -> dict:
    from scalerl.verify.differences import table
    from scalerl.verify.resume import Pair
    from tests.e2e import kills, watched_loop
    from tests.e2e.jobs import Inputs, Job, main_ppo

    steps = args.steps or args.kills + 10
    for script, out in (("make_data.py", directory), ("make_model.py", directory / "model")):
        subprocess.run(
            [sys.executable, str(EXAMPLE / script), "--out", str(out)], check=True, stdout=subprocess.DEVNULL
        )
    inputs = Inputs(directory / "model", directory / "rl_train.parquet", directory / "rl_val.parquet")
    pair = Pair(directory / "straight", directory / "killed", steps, 0)
    phases = (kills.START, *kills.PHASES, *(kills.CRITIC_PHASES if args.critic else ()))
    jobs: list[Job] = []

    def start(run_dir: Path) -> Job:
        keys = inputs.overrides(
            run_dir,
            f"actor_rollout_ref.rollout.name={args.engine}",
            *LAYOUTS[args.layout],
            *(CRITIC if args.critic else ()),
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={kills.SAVE_FREQ}",
            "trainer.test_freq=3",
            "trainer.val_before_train=false",
            "trainer.max_actor_ckpt_to_keep=2",
            f"trainer.async_save={str(args.async_save).lower()}",
            "trainer.logger=[console,file,mlflow]",
            f"trainer.custom_fit.path={watched_loop.__file__}",
        )
        jobs.append(Job(main_ppo(keys), run_dir))
        return jobs[-1]

    try:
        began = time.monotonic()
        usual_s = kills.run_to_the_end(lambda: start(pair.straight), pair.straight)
        print(
            f"{steps} steps left alone: {time.monotonic() - began:.0f} s; {usual_s[kills.START]:.1f} s to start",
            flush=True,
        )
        struck: list[kills.Struck] = []
        when = moments(args, kills.moments(args.seed, struck, phases))
        for kill in kills.run_killed(lambda: start(pair.resumed), pair.resumed, when, usual_s):
            struck.append(kill)
            print(
                f"kill {len(struck)}: {kill.phase} ({kill.wanted}), step {kill.num_steps} of its process, {kill.left}",
                flush=True,
            )
        if jobs[-1].process.returncode != 0:
            kills.run_to_the_end(lambda: start(pair.resumed), pair.resumed)
        seconds = time.monotonic() - began
    finally:
        for job in jobs:
            job.kill_all()
    findings = kills.problems(pair, is_exact=args.engine == "embedded")
    hit = kills.phases_hit(struck)
    print(table(findings))
    print(record.table([(phase, str(count), "") for phase, count in sorted(hit.items(), key=lambda item: -item[1])]))
    return {
        "kills": len(struck),
        "steps": steps,
        "processes": len(jobs) - 1,
        "seconds": seconds,
        "usual_s": usual_s,
        "kills_by_phase": hit,
        "missed": sorted(set(phases) - hit.keys()),
        "compared": {found.what: found.compared for found in findings},
        "differences": {found.what: found.difference for found in findings if found.difference is not None},
        "each": [asdict(kill) for kill in struck],
    }


def moments(args: argparse.Namespace, endless: Iterator) -> Iterator:
    """At most --kills of them, and none after --minutes."""
    began = time.monotonic()
    for moment in itertools.islice(endless, args.kills):
        if args.minutes is not None and time.monotonic() > began + 60 * args.minutes:
            return
        yield moment


if __name__ == "__main__":
    sys.exit(main())
