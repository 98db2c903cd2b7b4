"""`python -m scalerl.trainer.main_ppo KEY=VALUE ...`: reinforcement learning. `scalerl train` is the same."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from scalerl.base.user_code import forget_files
from scalerl.cluster.device import devices_line
from scalerl.config import asked_text, batch_table, jobs_of, run_jobs, total_steps
from scalerl.errors import run_main
from scalerl.trainer.checks.early import composed_run
from scalerl.trainer.console_texts import (
    StartPhases,
    finished_at,
    finished_text,
    printing_how_to_continue,
    say_composed,
    say_how_it_ended,
)
from scalerl.trainer.run_name import run_directory

if TYPE_CHECKING:
    from scalerl.cluster.processes import Processes
    from scalerl.trainer.checks.preflight import PPOInputs
    from scalerl.trainer.ppo import Run


def main(argv: Sequence[str] | None = None, processes: Processes | None = None) -> int:
    """Runs `scalerl train`.

    Returns 0 when the run (with trainer.val_only its validation) is done, 75 when it was asked to stop early.

    processes: processes that the run uses and leaves running at its end; None: the run starts its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (text := asked_text("ppo", arguments)) is not None:
        print(text)
        return 0
    if (jobs := jobs_of(arguments)) is not None:
        directory = partial(run_directory, "ppo")
        return run_jobs(jobs, lambda job: main(job, processes), directory, "trainer.default_local_dir")
    # Files that an earlier run in this process imported.
    forget_files()
    dry_run = "--dry-run" in arguments
    # Rules between keys are checked with the files and models, so that all errors are reported together.
    phases = StartPhases()
    with printing_how_to_continue("train", arguments, phases) as interrupted:
        phases.begin("config")
        composition = composed_run("ppo", [argument for argument in arguments if argument != "--dry-run"])
        cfg = composition.config
        interrupted.root = cfg.trainer.default_local_dir
        say_composed(composition)
        # A training loop of the user may end at any step.
        has_own_loop = cfg.trainer.custom_fit.path is not None
        if not (dry_run or cfg.trainer.val_only or has_own_loop) and (last := finished_at(cfg)):
            model_path = cfg.actor_rollout_ref.model.path
            print(finished_text(last, cfg.trainer, "actor_rollout_ref.model.path", model_path), flush=True)
            return 0

        # Imported here: --help and a configuration that cannot be read must not wait for torch.
        from scalerl.trainer.checks.models import learning_rate_line
        from scalerl.trainer.checks.preflight import check_ppo
        from scalerl.trainer.saving import checkpoints

        phases.begin("data")
        inputs = check_ppo(cfg, digests=not dry_run)
        phases.end()
        print(devices_line(cfg.trainer, inputs.device, inputs.attention.text), flush=True)
        print(batch_table(cfg, len(inputs.train)), flush=True)
        lr = cfg.actor_rollout_ref.actor.optim.lr
        if (line := learning_rate_line("actor_rollout_ref.actor.optim.lr", lr, inputs.shapes["actor"])) is not None:
            print(line, flush=True)
        if inputs.memory is not None:
            print(inputs.memory.summary, flush=True)
        if not cfg.trainer.val_only:
            num_steps = total_steps(cfg.trainer, len(inputs.train), cfg.data.train_batch_size)
            print(checkpoints.announcement(cfg.trainer, num_steps), flush=True)
        if dry_run:
            print(checkpoints.dry_run_text(inputs.resumed))
            return 0

        # A dry run does without torch's checkpoints.
        from scalerl.trainer.build import ppo_run
        from scalerl.trainer.custom_fit import call_fit
        from scalerl.trainer.own_report import log_report
        from scalerl.trainer.ppo import fit
        from scalerl.trainer.run_host import run_host

        def trained(inputs: PPOInputs) -> Run:
            with ppo_run(cfg, inputs, host) as run:
                validation = fit(run) if inputs.fit is None else call_fit(inputs.fit, run)
                for line in validation_lines(validation, run.tested_at, run.step):
                    run.tracker.message(line)
                # A run that is asked to stop has no time to lose.
                if not (cfg.trainer.val_only or run.stop.requested):
                    log_report(run.tracker, host.run_dir)
            return run

        with run_host(cfg, inputs, processes, phases) as host:
            run = host.train(inputs, trained)
    if cfg.trainer.val_only:
        return 0
    is_done = run.step >= run.total_steps or not run.stop.requested
    return say_how_it_ended("train", arguments, cfg.trainer, run, is_done)


def validation_lines(validation: Mapping[str, float], tested_at: int | None, ended_at: int) -> list[str]:
    """Lines with the val-core metrics of the last validation.

    A validation of an earlier step names that step, so that it is not read as the result of the training.
    """
    when = "" if tested_at == ended_at else f" (of step {tested_at}; the run ended at step {ended_at})"
    return [f"{key} {value:.4f}{when}" for key, value in validation.items() if key.startswith("val-core/")]


if __name__ == "__main__":
    sys.exit(run_main(main))
