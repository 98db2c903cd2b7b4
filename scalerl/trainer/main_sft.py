"""`python -m scalerl.trainer.main_sft KEY=VALUE ...`: supervised fine-tuning. `scalerl sft` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scalerl.config import compose, help_text
from scalerl.errors import run_main
from scalerl.trainer.stop import EXIT_REQUEUE


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the run is done, 75 when it was asked to stop early and can be resumed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print(help_text("sft"))
        return 0
    dry_run = "--dry-run" in arguments
    cfg = compose("sft", [argument for argument in arguments if argument != "--dry-run"])

    from scalerl.trainer.preflight import check_sft
    from scalerl.trainer.sft import fit, sft_run

    inputs = check_sft(cfg)
    if dry_run:
        print("Everything checked; --dry-run starts nothing.")
        return 0
    with sft_run(cfg, inputs) as run:
        fit(run)
        return 0 if run.step >= run.total_steps else EXIT_REQUEUE


if __name__ == "__main__":
    sys.exit(run_main(main))
