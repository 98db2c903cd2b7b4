"""`python -m scalerl.trainer.main_ppo KEY=VALUE ...`: reinforcement learning. `scalerl train` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scalerl.config import batch_table, compose, help_text
from scalerl.errors import run_main
from scalerl.trainer.stop import EXIT_REQUEUE


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the run (with trainer.val_only its validation) is done, 75 when it was asked to stop early."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print(help_text("ppo"))
        return 0
    dry_run = "--dry-run" in arguments
    cfg = compose("ppo", [argument for argument in arguments if argument != "--dry-run"])

    # Imported here: --help and configuration errors must not wait for torch.
    from scalerl.trainer.build import ppo_run
    from scalerl.trainer.ppo import fit
    from scalerl.trainer.preflight import check_ppo

    inputs = check_ppo(cfg)
    print(batch_table(cfg, len(inputs.train)), flush=True)
    if dry_run:
        print("Everything checked; --dry-run starts nothing.")
        return 0
    with ppo_run(cfg, inputs) as run:
        validation = fit(run)
        for key, value in validation.items():
            if key.startswith("val-core/"):
                run.tracker.message(f"{key} {value:.4f}")
        return 0 if cfg.trainer.val_only or run.step >= run.total_steps else EXIT_REQUEUE


if __name__ == "__main__":
    sys.exit(run_main(main))
