"""A training loop (`trainer.custom_fit`) that is scalerl's own, and tells whoever listens which phase it is in.

It writes a line into the pipe `PIPE` of trainer.default_local_dir, where there is one, as each phase begins; also as a
checkpoint is committed, and as an old one is removed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from scalerl.tracking.metrics import Timers
from scalerl.trainer import ppo
from scalerl.trainer.ppo import Run

PIPE = "phases.pipe"


def fit(run: Run) -> dict[str, float]:
    pipe = Path(run.config.trainer.default_local_dir) / PIPE
    if not pipe.exists():
        return ppo.fit(run)
    tell = _teller(pipe)

    def enter(phase: str) -> None:
        run.tracker.phase(phase)
        tell(phase)

    def see_rename(event: str, arguments: tuple) -> None:
        if event == "os.rename":
            source, target = (os.path.basename(os.fspath(path)) for path in arguments[:2])
            if ".deleting-" in target:
                tell("rotation")
            elif ".tmp-" in source:
                tell("commit")

    run.timers = Timers(on_enter=enter)
    sys.addaudithook(see_rename)
    return ppo.fit(run)


def _teller(pipe: Path) -> Callable[[str], None]:
    # For reading too, so that a reader which is gone breaks nothing.
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)

    def tell(phase: str) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(descriptor, f"{phase}\n".encode())

    return tell
