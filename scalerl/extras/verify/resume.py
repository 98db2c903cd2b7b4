"""`scalerl verify-resume`: whether a run that is stopped and resumed has the numbers of a run that nobody stopped."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scalerl.base.user_code import forget_files
from scalerl.config import PPOConfig, SFTConfig, compose
from scalerl.config.servers import engines_with, traits_of
from scalerl.errors import CommandParser, RunError, UserError
from scalerl.extras.verify.differences import (
    ComparedPart,
    compare_models,
    compare_random_states,
    compare_samples,
    compare_states,
    compared_part,
    metric_differences,
    table,
)
from scalerl.tracking.chart_sections import SECTIONS
from scalerl.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from scalerl.cluster.processes import Processes

USAGE = """\
scalerl verify-resume [train | sft] key=value ... [--steps N] [--at K] [--keep]

Trains N steps (default 4) in one go, and again K steps (default N/2), a stop, and the rest in a new process, with the
keys of scalerl train, or those of scalerl sft behind the word sft; then compares weights, optimizers, learning rates,
random states, place in the data, sampled tokens, metrics and MLflow's history bit for bit. It validates nothing. Exit
code 0 where all is the same, 1 where something differs, whose name is printed.
Writes to DIR/verify_resume (DIR: trainer.default_local_dir) and removes it, unless --keep is given or something
differs. Where a resume draws other samples it compares steps, prompts, learning rates and the state of the run alone:
with SGLang, whose sampler has no state that could be saved, and where servers of a pool of their own run ahead
(trainer.max_staleness).
"""
# The configurations of the two commands that train.
RunKind = Literal["ppo", "sft"]
DIRECTORY = "verify_resume"
# Name of the comparison of what MLflow has.
MLFLOW = "MLflow's history"
# Of the runs; what of the user's keys they replace.
_KEYS = (
    "trainer.save_freq=-1",
    "trainer.best_ckpt_to_keep=0",
    "trainer.best_ckpt_metric=null",
    "trainer.resume_mode=auto",
    "trainer.resume_from_path=null",
    "trainer.checkpoint_mirror=null",
    "trainer.profile_steps=[]",
    "trainer.logger=[file,mlflow]",
)
_KEYS_OF: dict[RunKind, tuple[str, ...]] = {
    "ppo": (
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.val_only=false",
        "trainer.rollout_data_freq=1",
    ),
    "sft": ("trainer.test_freq=0",),
}
_LEARNING_RATES: dict[RunKind, tuple[str, ...]] = {"ppo": ("actor/lr", "critic/lr"), "sft": ("train/lr",)}
# Columns of a dump that say what was asked for, not what came.
_ASKED = ("prompt_uid", "uid", "sample_index", "seed")


@dataclass(frozen=True)
class Pair:
    """Directories of the run in one go and of the one that was stopped, and their steps.  kind: of both."""

    kind: RunKind
    straight: Path
    resumed: Path
    num_steps: int
    stopped_at: int

    @property
    def checkpoints(self) -> tuple[Path, Path]:
        straight, resumed = (at / f"global_step_{self.num_steps}" for at in (self.straight, self.resumed))
        return straight, resumed


def main(argv: Sequence[str], processes: Processes | None = None) -> int:
    """Runs `scalerl verify-resume`; returns 0 where all is the same, 1 where not.  processes: as `main_ppo.main`."""
    if not {"-h", "--help"}.isdisjoint(argv):
        print(USAGE)
        return 0
    parser = CommandParser(prog="scalerl verify-resume", usage=USAGE, add_help=False)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--at", type=int, default=None)
    parser.add_argument("--keep", action="store_true")
    options, arguments = parser.parse_known_args(list(argv))
    at = options.steps // 2 if options.at is None else options.at
    if not 0 < at < options.steps:
        raise UserError(f"--steps {options.steps} --at {at}: a run can be stopped after step 1 to {options.steps - 1}")
    kind, keys = read_kind(arguments)
    cfg = compose(kind, keys, rules=False)
    root = Path(cfg.trainer.default_local_dir) / DIRECTORY
    if root.exists():
        raise UserError(f"{root} is there already, of an earlier verification: remove it, or give another directory")
    pair = Pair(kind, root / "straight", root / "resumed", options.steps, at)
    straight, resumed = (run_keys(kind, keys, run_dir, options.steps) for run_dir in (pair.straight, pair.resumed))
    print(f"verify-resume: {options.steps} steps in one go", flush=True)
    train(kind, straight, processes)
    print(f"verify-resume: {at} steps, then a stop", flush=True)
    train(kind, resumed, processes, stop_after=at)
    print(f"verify-resume: steps {at + 1} to {options.steps}, resumed", flush=True)
    train_in_new_process(kind, resumed)
    reason = None if isinstance(cfg, SFTConfig) else why_others(cfg)
    is_ahead = isinstance(cfg, PPOConfig) and runs_ahead(cfg)
    parts = compare(pair, is_exact=reason is None, is_ahead=is_ahead)
    print(table(parts))
    if reason is not None:
        print(f"  not compared: tokens, weights, optimizers and other metrics. {reason}")
    same = all(each.difference is None for each in parts)
    if same and not options.keep:
        shutil.rmtree(root)
    else:
        print(f"both runs are in {root}")
    return 0 if same else 1


def read_kind(arguments: Sequence[str]) -> tuple[RunKind, list[str]]:
    """Reads what trains, `train` where no word says it, and the keys behind it."""
    if arguments and arguments[0] in ("train", "sft"):
        return ("sft" if arguments[0] == "sft" else "ppo"), list(arguments[1:])
    return "ppo", list(arguments)


def runs_ahead(cfg: PPOConfig) -> bool:
    """Whether servers sample for the next steps while a step trains, as they have not for the first after a resume."""
    return cfg.trainer.max_staleness > 0 and not cfg.actor_rollout_ref.hybrid_engine


def why_others(cfg: PPOConfig) -> str | None:
    """Why a correct run has other samples after a resume; None where it has the same."""
    name = cfg.actor_rollout_ref.rollout.name
    if not traits_of(name).repeats_draws:
        return (
            f"{name} draws others after a resume: its sampler has no state that could be saved "
            f"(rollout.name={engines_with(lambda traits: traits.repeats_draws)} has)"
        )
    if runs_ahead(cfg):
        return (
            "The servers sample ahead, and the first steps after a resume have samples of a newer policy "
            "(trainer.max_staleness=0 compares all)"
        )
    return None


def run_keys(kind: RunKind, keys: Sequence[str], run_dir: Path, num_steps: int) -> list[str]:
    """The keys of a run of this verification: the user's own, then its length and its directories."""
    dumps = [f"trainer.rollout_data_dir={run_dir / 'rollouts'}"] if kind == "ppo" else []
    return [
        *keys,
        *_KEYS,
        *_KEYS_OF[kind],
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={run_dir}",
        f"trainer.mlflow_tracking_uri={_mlflow_uri(run_dir)}",
        *dumps,
    ]


def train(kind: RunKind, keys: Sequence[str], processes: Processes | None, *, stop_after: int | None = None) -> None:
    """Trains as `scalerl train` or `scalerl sft` does.  stop_after: the step after which it ends, with a checkpoint."""
    forget_files()
    if kind == "sft":
        _train_sft(compose("sft", keys, rules=False), processes, stop_after)
    else:
        _train_rl(compose("ppo", keys, rules=False), processes, stop_after)


def _train_rl(cfg: PPOConfig, processes: Processes | None, stop_after: int | None) -> None:
    from scalerl.trainer.build import ppo_run
    from scalerl.trainer.checks.preflight import check_ppo
    from scalerl.trainer.custom_fit import call_fit
    from scalerl.trainer.ppo import fit
    from scalerl.trainer.run_host import run_host

    inputs = check_ppo(cfg)
    with run_host(cfg, inputs, processes) as host, ppo_run(cfg, inputs, host) as run:
        run.total_steps = stop_after or run.total_steps
        if inputs.fit is None:
            fit(run)
        else:
            call_fit(inputs.fit, run)


def _train_sft(cfg: SFTConfig, processes: Processes | None, stop_after: int | None) -> None:
    from scalerl.trainer.checks.preflight import check_sft
    from scalerl.trainer.run_host import run_host
    from scalerl.trainer.sft import fit, sft_run

    inputs = check_sft(cfg)
    with run_host(cfg, inputs, processes) as host, sft_run(cfg, inputs, host) as run:
        run.total_steps = stop_after or run.total_steps
        fit(run)


def train_in_new_process(kind: RunKind, keys: Sequence[str]) -> None:
    """Trains as `scalerl train` or `scalerl sft` does, in a process that knows nothing but what was saved.

    Raises RunError, when its output has said why, if it fails. A SIGTERM is passed to that process.
    """
    program = f"scalerl.trainer.main_{kind}"
    process = subprocess.Popen([sys.executable, "-m", program, *keys])
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate()) if is_main else None
    try:
        code = process.wait()
    finally:
        # After Ctrl-C, which it has got too.
        process.wait()
        if is_main:
            signal.signal(signal.SIGTERM, before)
    if code:
        raise RunError(f"verify-resume: the resumed run ended with exit code {code}; its output says why")


def compare(pair: Pair, *, is_exact: bool, is_ahead: bool = False) -> list[ComparedPart]:
    """Compares the straight run with the resumed one.  is_exact: the sampler draws the same again.

    is_ahead: samples may be of another policy (`runs_ahead`).
    """
    metrics = [read_metrics(at) for at in (pair.straight, pair.resumed)]
    lr_differences = metric_differences(*metrics, wanted=_LEARNING_RATES[pair.kind].__contains__)
    parts = [
        ComparedPart("steps", f"1 to {pair.num_steps}", _steps(metrics[1], pair.num_steps)),
        *_samples(pair, is_exact, is_ahead),
        compare_states(*pair.checkpoints),
        compared_part("learning rates", f"{pair.num_steps} steps", lr_differences),
    ]
    if is_exact:
        parts += compare_models(*pair.checkpoints)
        parts.append(compare_random_states(*pair.checkpoints))
        num_metrics = sum(map(len, metrics[0].values()))
        parts.append(compared_part("metrics", f"{num_metrics} numbers", metric_differences(*metrics)))
    return [*parts, _histories(pair, is_exact)]


def _steps(metrics: dict[int, dict[str, float]], num_steps: int) -> str | None:
    return None if sorted(metrics) == list(range(1, num_steps + 1)) else f"logged steps are {sorted(metrics)}"


def _samples(pair: Pair, is_exact: bool, is_ahead: bool) -> list[ComparedPart]:
    """Fine-tuning samples nothing: the state of the run has its place in the data."""
    if pair.kind == "sft":
        return []
    straight, resumed = (at / "rollouts" for at in (pair.straight, pair.resumed))
    asked = _ASKED if is_ahead else (*_ASKED, "policy_version")
    return [compare_samples(straight, resumed, range(1, pair.num_steps + 1), None if is_exact else asked)]


def _histories(pair: Pair, is_exact: bool) -> ComparedPart:
    from scalerl.tracking.mlflow_store import read_histories

    histories = [read_histories(_mlflow_uri(at)) for at in (pair.straight, pair.resumed)]
    numbers = sum(len(data) for run in histories[0].values() for data in run.values())

    def differences() -> Iterator[str]:
        if len(histories[1]) != 1:
            yield f"the resumed run is {len(histories[1])} runs in MLflow"
            return
        ours, theirs = (next(iter(runs.values())) for runs in histories)
        yield from metric_differences(ours, theirs, wanted=is_of_history if is_exact else "training/global_step".__eq__)

    return compared_part(MLFLOW, f"{numbers} numbers of one run", differences())


def is_of_history(key: str) -> bool:
    """Whether a metric of MLflow is one that two runs share."""
    # Charts have numbers a second time, of which some are measured.
    copies = (f"{section}/" for section, _ in SECTIONS)
    return not key.startswith(("val-", "system/", *copies))


def _mlflow_uri(run_dir: Path) -> str:
    # Imported here: a package of trackers, where numpy comes with them.
    from scalerl.tracking.mlflow_store import sqlite_uri

    return sqlite_uri(run_dir.absolute() / "mlflow.db")
