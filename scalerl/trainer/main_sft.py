"""`python -m scalerl.trainer.main_sft KEY=VALUE ...`: supervised fine-tuning. `scalerl sft` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from scalerl.base.user_code import forget_files
from scalerl.cluster.device import devices_line
from scalerl.config import asked_text, jobs_of, run_jobs, total_steps
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
    from scalerl.trainer.checks.preflight import SFTInputs
    from scalerl.trainer.sft import SFTRun


def main(argv: Sequence[str] | None = None, processes: Processes | None = None) -> int:
    """Runs `scalerl sft`.

    Returns 0 when the run is done, 75 when it was asked to stop early and can be resumed.

    processes: processes that the run uses and leaves running at its end; None: the run starts its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (text := asked_text("sft", arguments)) is not None:
        print(text)
        return 0
    if (jobs := jobs_of(arguments)) is not None:
        directory = partial(run_directory, "sft")
        return run_jobs(jobs, lambda job: main(job, processes), directory, "trainer.default_local_dir")
    # Files that an earlier run in this process imported.
    forget_files()
    dry_run = "--dry-run" in arguments
    # Rules between keys are checked with the files and models, so that all errors are reported together.
    phases = StartPhases()
    with printing_how_to_continue("sft", arguments, phases) as interrupted:
        phases.begin("config")
        composition = composed_run("sft", [argument for argument in arguments if argument != "--dry-run"])
        cfg = composition.config
        interrupted.root = cfg.trainer.default_local_dir
        say_composed(composition)
        if not dry_run and (last := finished_at(cfg)):
            print(finished_text(last, cfg.trainer, "model.path", cfg.model.path), flush=True)
            return 0

        from scalerl.trainer.checks.models import learning_rate_line
        from scalerl.trainer.checks.preflight import check_sft
        from scalerl.trainer.saving import checkpoints

        phases.begin("data")
        inputs = check_sft(cfg, digests=not dry_run)
        phases.end()
        num_steps = total_steps(cfg.trainer, len(inputs.train), cfg.data.train_batch_size)
        print(devices_line(cfg.trainer, inputs.device, inputs.attention.text), flush=True)
        if (line := learning_rate_line("optim.lr", cfg.optim.lr, inputs.shapes["actor"])) is not None:
            print(line, flush=True)
        for key, dataset in (("train_files", inputs.train), ("val_files", inputs.val)):
            if dataset is not None and len(dataset) > dataset.num_rows:
                print(
                    f"data.{key}: {dataset.num_rows} rows make {len(dataset)} conversations, because the chat template "
                    "rewrites earlier turns",
                    flush=True,
                )
        if inputs.memory is not None:
            print(inputs.memory.summary, flush=True)
        print(f"steps of the run: {num_steps}\n{checkpoints.announcement(cfg.trainer, num_steps)}", flush=True)
        if dry_run:
            print(checkpoints.dry_run_text(inputs.resumed))
            return 0

        from scalerl.trainer.own_report import log_report
        from scalerl.trainer.run_host import run_host
        from scalerl.trainer.sft import fit, sft_run

        def trained(inputs: SFTInputs) -> SFTRun:
            with sft_run(cfg, inputs, host) as run:
                fit(run)
                # A run that is asked to stop has no time to lose.
                if not run.stop.requested:
                    log_report(run.tracker, host.run_dir)
            return run

        with run_host(cfg, inputs, processes, phases) as host:
            run = host.train(inputs, trained)
    is_done = run.step >= run.total_steps
    return say_how_it_ended("sft", arguments, cfg.trainer, run, is_done)


if __name__ == "__main__":
    sys.exit(run_main(main))
