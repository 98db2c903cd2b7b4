"""Backend `console`: one line per step on standard output, and on a terminal a live panel below the lines."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scalerl.tracking.backend import RunInfo, register_backend

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_MAX_CELL = 200
# Phases in the order of a step, with the names that the line shows.
_PHASES = {
    "gen": "gen",
    "old_log_prob": "logp",
    "ref": "ref",
    "values": "values",
    "reward_model": "rm",
    "update_critic": "critic",
    "update_actor": "update",
    "update": "update",
    "update_weights": "sync",
    "save_checkpoint": "save",
    "testing": "val",
}
# Names of numbers in the line, each with its possible keys; the first key that a step has is shown.
_NUMBERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), ".3f"),
    ("loss", ("train/loss",), ".4f"),
    ("val_loss", ("val/loss",), ".4f"),
    ("len", ("response_length/mean",), ".1f"),
    ("tok/s", ("perf/throughput",), ".0f"),
)
_MFU = ("perf/mfu/actor", "train/mfu")
_ETA_STEPS = 20


@register_backend("console")
class ConsoleBackend:
    """Prints progress; the only backend without a thread, so that its lines stay in order with other output."""

    def __init__(self, run: RunInfo) -> None:
        self.progress = Progress(run.total_steps)

    def log(self, data: Mapping[str, float], step: int, time_s: float) -> None:
        self.progress.update(step, data)

    def log_artifact(self, path: Path) -> None:
        """Does nothing: the console shows no files."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.progress.message(f"{name} at step {step}:")
        for row in rows:
            cells = (f"{column}={_printable(cell)}" for column, cell in zip(columns, row, strict=True))
            self.progress.message("  " + "  ".join(cells))

    def finish(self, status: str) -> None:
        self.progress.close()


class Progress:
    """Prints one line per logged step, and draws a live panel on a terminal.

    total_steps: None when unknown.  stream: default standard output.  clock: monotonic seconds.
    terminal: True draws the live panel; default: if the stream is a terminal that can move its cursor.
    """

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._stream = sys.stdout if stream is None else stream
        self._is_stdout = stream is None
        self._clock = clock
        # Keeps what is written in order. The thread that draws must never wait for it, as that thread holds the panel's
        # own lock, for which a writer waits.
        self._lock = threading.RLock()
        # Guards what the panel shows. Nothing waits while holding it.
        self._state = threading.Lock()
        self._step = 0
        self._last_step_at = clock()
        self._recent_s: deque[float] = deque(maxlen=_ETA_STEPS)
        self._last: Mapping[str, float] = {}
        self._phase: tuple[str, float] | None = None
        self._closed = False
        self._console: Console | None = None
        self._live: Live | None = None
        if _is_terminal(self._stream) if terminal is None else terminal:
            self._start_live()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints one line for what was logged at a step; a log without training numbers (validation) is no step."""
        with self._lock:
            now = self._clock()
            with self._state:
                self._phase = None
                if _is_step(metrics):
                    self._recent_s.append(metrics.get("timing_s/step", now - self._last_step_at))
                    self._step, self._last_step_at, self._last = step, now, metrics
            self._print(self.line(step, metrics))

    def phase(self, name: str) -> None:
        """Sets the phase that runs now, which only the live panel shows."""
        with self._lock:
            now = self._clock()
            with self._state:
                self._phase = (_PHASES.get(name, name), now)
            if self._live is not None:
                self._live.refresh()

    def message(self, text: str) -> None:
        """Prints a line of text."""
        with self._lock:
            self._print(text)

    def close(self) -> None:
        """Ends the live panel and restores the cursor; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live, self._live = self._live, None
        # Outside the lock: stop() joins the thread that draws.
        if live is not None:
            live.stop()
            atexit.unregister(self.close)

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """The line of a step: `step 12/40  reward 0.630  tok/s 5321  gen 1.2s  update 0.8s  | 3.1s  eta 1m26s`."""
        parts = [f"step {step}" if self.total_steps is None else f"step {step}/{self.total_steps}"]
        parts += _numbers(metrics)
        parts += _phase_texts(metrics)
        if "timing_s/step" in metrics:
            parts.append(f"| {metrics['timing_s/step']:.1f}s")
        eta = self._eta_s(step) if _is_step(metrics) else None
        return "  ".join(parts if eta is None else [*parts, f"eta {duration(eta)}"])

    def _eta_s(self, step: int) -> float | None:
        if self.total_steps is None or not self._recent_s or step >= self.total_steps:
            return None
        return sum(self._recent_s) / len(self._recent_s) * (self.total_steps - step)

    def _print(self, text: str) -> None:
        if self._console is not None and self._live is not None:
            # No markup, no highlighting, no wrapping: text of models and data is shown as it is.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._live.refresh()
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, force_terminal=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._panel,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=self._is_stdout,
            redirect_stderr=self._is_stdout,
        )
        self._live.start(refresh=True)
        # An exception that nobody catches must not leave the cursor hidden.
        atexit.register(self.close)

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        now = self._clock()
        with self._state:
            total = "?" if self.total_steps is None else self.total_steps
            head = Text(f"step {self._step}/{total}", style="bold")
            eta = self._eta_s(self._step)
            if eta is not None:
                remaining_s = max(0.0, eta - (now - self._last_step_at))
                head.append(f"   eta {duration(remaining_s)}", style="default")
            if self._phase is not None:
                name, since = self._phase
                head.append(f"   now: {name} {duration(now - since)}", style="dim")
            rows: list[Any] = [head]
            if self._last:
                rows.append(Text("   ".join(_numbers(self._last))))
                rows.append(Text("   ".join(_phase_texts(self._last))))
        return Panel(Group(*rows), title="scalerl", title_align="left", expand=False)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the shown name of a phase, in the order of a step; "other" is the rest of timing_s/step."""
    phases = {short: metrics[f"timing_s/{name}"] for name, short in _PHASES.items() if f"timing_s/{name}" in metrics}
    if "timing_s/step" in metrics:
        phases["other"] = max(0.0, metrics["timing_s/step"] - sum(phases.values()))
    return phases


def _phase_texts(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {seconds:.1f}s" for name, seconds in phase_seconds(metrics).items() if seconds >= 0.05]


def duration(seconds: float) -> str:
    """A time as short text: 4s, 1m26s, 2h05m, 3d04h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"


def _is_step(metrics: Mapping[str, float]) -> bool:
    return "timing_s/step" in metrics or any(key in metrics for key in ("critic/score/mean", "train/loss"))


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    texts = []
    for name, keys, spec in _NUMBERS:
        value = next((metrics[key] for key in keys if key in metrics), None)
        if value is not None:
            texts.append(f"{name} {value:{spec}}")
    share = next((metrics[key] for key in _MFU if key in metrics), None)
    if share is not None:
        texts.append(f"mfu {share:.1%}")
    validation = {key: value for key, value in metrics.items() if key.startswith("val-core/") and "/mean@" in key}
    for key, value in validation.items():
        source = key.removeprefix("val-core/").partition("/reward/")[0]
        texts.append(f"val {value:.3f}" if len(validation) == 1 else f"val[{source}] {value:.3f}")
    return texts


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown")


def _printable(cell: Any) -> str:
    """A cell as one line of text, with control characters escaped, which a model may have sampled."""
    text = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"
