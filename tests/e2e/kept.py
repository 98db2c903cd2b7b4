"""Runs in processes that stay from one test to the next: the command's own code, but for what a new process pays."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerl.cluster.processes import Processes
from scalerl.errors import run_main
from tests.e2e.jobs import Record
from tests.e2e.step_checks import check_steps


@dataclass(frozen=True)
class Finished:
    """How a run ended. stdout, stderr: of the driver."""

    code: int
    stdout: str
    stderr: str

    def tail(self) -> str:
        return f"\n--- stdout\n{self.stdout[-2000:]}\n--- stderr\n{self.stderr[-6000:]}"


@dataclass(frozen=True)
class Kept:
    """Runs one after another. A run that fails takes its processes with it."""

    processes: Processes

    def train(self, arguments: Sequence[str], own_keys: Sequence[str] = ()) -> Finished:
        """`scalerl train ARGUMENTS`. own_keys: metrics of the test's own code, which no page documents."""
        from scalerl.trainer.main_ppo import main

        return self._run(main, arguments, own_keys)

    def sft(self, arguments: Sequence[str]) -> Finished:
        """`scalerl sft ARGUMENTS`"""
        from scalerl.trainer.main_sft import main

        return self._run(main, arguments, ())

    def generate(self, arguments: Sequence[str]) -> Finished:
        """`scalerl generate ARGUMENTS`"""
        from scalerl.commands.main_generation import main

        return self._run(main, arguments, ())

    def _run(self, main: Callable[..., int], arguments: Sequence[str], own_keys: Sequence[str]) -> Finished:
        """Of a run that came to its end the steps are checked."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_main(main, arguments, self.processes)
        directory = [text.partition("=")[2] for text in arguments if text.startswith("trainer.default_local_dir=")]
        if code == 0 and directory:
            check_steps(Record.read(Path(directory[-1])).final.values(), own_keys)
        return Finished(code, out.getvalue(), err.getvalue())
