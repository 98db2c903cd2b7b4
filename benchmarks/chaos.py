"""SIGKILL of a whole training job again and again, and the same command after each: is the run the same in the end?

python benchmarks/chaos.py                                     # 100 kills, embedded engine, one rank
python benchmarks/chaos.py --engine sglang
python benchmarks/chaos.py --layout tp2 --critic
python benchmarks/chaos.py --async-save --minutes 30
python benchmarks/chaos.py --agents                            # samples of several conversations over HTTP
python benchmarks/chaos.py --directory /data/chaos             # the same command goes on where it was cut

One run is left alone. The other is killed --kills times, every process of the job at once, at moments that --seed
chooses: each phase of a step, the start, the writing, commit and removal of checkpoints, somewhere within its usual
length; what was missed, as a commit of 2 ms, is tried more often. Afterwards it goes on to its end, and must be the run
that was left alone: steps, samples, weights, optimizer, random states, state of the run, MLflow's history, bit for bit,
and in every line that any of the processes logged. With SGLang, whose sampler has no state that could be saved: steps,
prompts, learning rates, state of the run.

What is in --directory is kept after each kill (chaos.json): the same command goes on where it was cut,
and one with more --kills and the same --steps adds to them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

from scalerl.base.files import whole_file
from scalerl.errors import UserError

LAYOUTS = {
    "one": ["trainer.n_gpus_per_node=1"],
    "dp2": ["trainer.n_gpus_per_node=2"],
    "tp2": ["trainer.n_gpus_per_node=2", "+layout=tp2"],
    "pp2": ["trainer.n_gpus_per_node=2", "+layout=pp2"],
}
# Samples are made by agents that talk to the chat endpoint of a rollout worker.
AGENTS = [
    f"actor_rollout_ref.rollout.program.path={record.REPOSITORY / 'tests' / 'e2e' / 'asking_agent.py'}",
    "actor_rollout_ref.rollout.program.name=agent",
    "data.max_prompt_length=32",
    "data.max_response_length=24",
]
# The weight of the KL moves from step to step, and so belongs to the state of the run.
CRITIC = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl={type:adaptive,kl_coef:0.1,horizon:100,target_kl:0.1}",
]
EXAMPLE = record.REPOSITORY / "examples" / "arithmetic"
# From so many on the phases of about 1 ms are chosen too.
_MANY_KILLS = 60
# In --directory.
PROGRESS = "chaos.json"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="one", help="of the ranks; default: one rank")
    parser.add_argument("--critic", action="store_true", help="PPO with a critic and a KL in the reward; else GRPO")
    parser.add_argument("--agents", action="store_true", help="samples are made by agents; else each is one answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="of the run; default: one for each kill, and 10")
    parser.add_argument("--async-save", action="store_true", help="trainer.async_save=true")
    parser.add_argument("--minutes", type=float, default=None, help="after these no further kill")
    parser.add_argument(
        "--directory",
        default=None,
        help="where the runs are, and how far they are; default: for temporary files, removed",
    )
    parser.add_argument(
        "--out",
        help="result file; default DATE-chaos-ENGINE[-LAYOUT][-critic][-async][-agents]-cpu.json in results",
    )
    record.add_now(parser)
    return parser.parse_args(arguments)


@dataclass
class Progress:
    """How far the kills in a directory are; kept there after each, so that the same command goes on when it was cut.

    options: what the runs depend on.  usual_s: of the run left alone, once it is done.  marker: of the job that runs.
    """

    options: dict[str, Any]
    usual_s: dict[str, float] | None = None
    struck: list[dict[str, Any]] = field(default_factory=list)
    processes: int = 0
    seconds: float = 0.0
    marker: str | None = None
    is_done: bool = False

    @classmethod
    def of(cls, directory: Path, options: dict[str, Any]) -> Progress:
        """The one that is there, or a new one. Raises UserError for one of other options."""
        path = directory / PROGRESS
        if not path.exists():
            return cls(options)
        progress = cls(**json.loads(path.read_text(encoding="utf-8")))
        if progress.options != options:
            other = ", ".join(
                f"{key} {progress.options.get(key)}, now {options[key]}"
                for key in options
                if progress.options.get(key) != options[key]
            )
            raise UserError(f"{directory} has kills of another run ({other}): give another --directory")
        return progress

    def keep(self, directory: Path) -> None:
        with whole_file(directory / PROGRESS) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    # So that `timeout` or a scheduler leaves no job behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ran_on = record.machine("cpu", now=args.now)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        try:
            result = run(args, Path(args.directory or name).absolute())
        except UserError as error:
            sys.exit(str(error))
    variant = (args.engine, *((args.layout,) if args.layout != "one" else ()))
    variant += ("critic",) * args.critic + ("async",) * args.async_save + ("agents",) * args.agents
    record.keep("_".join(("chaos", *variant)), arguments, vars(args), ran_on, result, device="cpu")
    return 0 if not result["differences"] else 1


def run(args: argparse.Namespace, directory: Path) -> dict:
    from scalerl.extras.verify.differences import table
    from scalerl.extras.verify.resume import Pair
    from tests.e2e import kills, watched_loop
    from tests.e2e.jobs import Inputs, Job, kill_marked, main_ppo

    steps = args.steps or args.kills + 10
    shape = {name: getattr(args, name) for name in ("engine", "layout", "critic", "seed", "async_save", "agents")}
    progress = Progress.of(directory, {**shape, "steps": steps})
    inputs = Inputs(directory / "model", directory / "rl_train.parquet", directory / "rl_val.parquet")
    pair = Pair("ppo", directory / "straight", directory / "killed", steps, 0)
    phases = (kills.START, *kills.PHASES, *(kills.CRITIC_PHASES if args.critic else ()))
    phases += kills.BRIEF_PHASES if args.kills >= _MANY_KILLS else ()
    jobs: list[Job] = []

    def start(run_dir: Path) -> Job:
        keys = inputs.overrides(
            run_dir,
            f"actor_rollout_ref.rollout.name={args.engine}",
            *LAYOUTS[args.layout],
            *(CRITIC if args.critic else ()),
            *(AGENTS if args.agents else ()),
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={kills.SAVE_FREQ}",
            "trainer.test_freq=3",
            "trainer.val_before_train=false",
            "trainer.max_actor_ckpt_to_keep=2",
            f"trainer.async_save={str(args.async_save).lower()}",
            "trainer.logger=[console,file,mlflow]",
            f"trainer.custom_fit.path={watched_loop.__file__}",
        )
        progress.marker = uuid.uuid4().hex
        progress.keep(directory)
        jobs.append(Job(main_ppo(keys), run_dir, progress.marker))
        return jobs[-1]

    began = time.monotonic() - progress.seconds

    def advanced() -> None:
        progress.seconds = time.monotonic() - began
        progress.keep(directory)

    try:
        if progress.marker is not None:
            kill_marked(progress.marker)
        if progress.usual_s is None:
            # Half a run would go on, and then was not left alone.
            for run_dir in (pair.straight, pair.resumed):
                shutil.rmtree(run_dir, ignore_errors=True)
            for script, out in (("make_data.py", directory), ("make_model.py", directory / "model")):
                subprocess.run(
                    [sys.executable, str(EXAMPLE / script), "--out", str(out)], check=True, stdout=subprocess.DEVNULL
                )
            progress.usual_s = kills.run_to_the_end(lambda: start(pair.straight), pair.straight)
            advanced()
            print(
                f"{steps} steps left alone: {progress.seconds:.0f} s; {progress.usual_s[kills.START]:.1f} s to start",
                flush=True,
            )
        else:
            print(f"goes on after {len(progress.struck)} kills of an earlier command", flush=True)
        struck: list[kills.Struck] = []
        endless = kills.moments(args.seed, struck, phases)
        for kill in progress.struck:
            # The same moments follow as if nobody had cut the command.
            next(endless)
            struck.append(kills.Struck(**{**kill, "left": tuple(kill["left"])}))
        if not progress.is_done:
            when = moments(args, endless, len(struck))
            for kill in kills.run_killed(lambda: start(pair.resumed), pair.resumed, when, progress.usual_s):
                struck.append(kill)
                progress.struck.append(asdict(kill))
                progress.processes += 1
                advanced()
                print(
                    f"kill {len(struck)}: {kill.phase} ({kill.wanted}), "
                    f"step {kill.num_steps} of its process, {kill.left}",
                    flush=True,
                )
            if not jobs or jobs[-1].process.returncode != 0 or jobs[-1].directory != pair.resumed:
                kills.run_to_the_end(lambda: start(pair.resumed), pair.resumed)
            progress.processes += 1
            progress.marker, progress.is_done = None, True
            advanced()
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
        "processes": progress.processes,
        "seconds": progress.seconds,
        "usual_s": progress.usual_s,
        "kills_by_phase": hit,
        "missed": sorted(set(phases) - hit.keys()),
        "compared": {finding.what: finding.compared for finding in findings},
        "differences": {finding.what: finding.difference for finding in findings if finding.difference is not None},
        "each": [asdict(kill) for kill in struck],
    }


def moments(args: argparse.Namespace, endless: Iterator, num_done: int) -> Iterator:
    """As many as are missing to --kills, and none after --minutes."""
    began = time.monotonic()
    for moment in itertools.islice(endless, max(0, args.kills - num_done)):
        if args.minutes is not None and time.monotonic() > began + 60 * args.minutes:
            return
        yield moment


if __name__ == "__main__":
    sys.exit(main())
