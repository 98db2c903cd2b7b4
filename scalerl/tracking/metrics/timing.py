"""Times of a step's parts, and metrics of time per token and throughput per device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import psutil

from scalerl.tracking.timeline import Spans

STEP = "step"
UNTIMED = "untimed"
SAMPLED_TOKEN_PHASES = ("gen",)
ALL_TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class Timers:
    """Timers of a step's parts: `with timers("gen"):` adds to the seconds of gen. For one thread.

    Inside `timers("step")` a part keeps its name; inside another part it is named outer/name, and its time also counts
    for outer.  clock: monotonic seconds.  on_enter: called with the name of each part that is in no other part, when it
    begins.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_enter: Callable[[str], None] | None = None
    ) -> None:
        self._clock = clock
        # Of the parts that are in no other part.
        self.spans = Spans("driver")
        self._on_enter = on_enter
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        # Seconds of the parts that ran outside `timers("step")`.
        self._outside_s = 0.0
        self._popped_at = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as a part.

        Raises ValueError for a name that is empty, `untimed` or has "/", and for `step` inside a part.
        """
        if not name or name == UNTIMED or "/" in name:
            raise ValueError(f"timer name {name!r}: use a name without '/' that is not {UNTIMED!r}")
        if name == STEP and self._open:
            raise ValueError(f"timer {STEP!r} inside {'/'.join(self._open)}: the step contains its parts")
        outside = not self._open
        self._open.append(name)
        path = "/".join(part for part in self._open if part != STEP) or STEP
        is_outer = path == name and name != STEP
        if self._on_enter is not None and is_outer:
            self._on_enter(name)
        begin = self._clock()
        try:
            with self.spans(name) if is_outer else nullcontext():
                yield
        finally:
            seconds = self._clock() - begin
            self._open.pop()
            self._seconds[path] = self._seconds.get(path, 0.0) + seconds
            if outside and name != STEP:
                self._outside_s += seconds

    def pop(self) -> dict[str, float]:
        """Returns the seconds by name since the last pop; the parts without "/" and `untimed` add up to `step`.

        step: the time in `timers("step")` plus the parts outside it; without that timer, the time since the last pop.
        Raises RuntimeError while a timer runs.
        """
        if self._open:
            raise RuntimeError(f"Timers.pop while {'/'.join(self._open)} is running: pop after the step has ended")
        now = self._clock()
        seconds, outside_s, since = self._seconds, self._outside_s, self._popped_at
        self._seconds, self._outside_s, self._popped_at = {}, 0.0, now
        step = seconds.pop(STEP) + outside_s if STEP in seconds else now - since
        parts = sum(value for name, value in seconds.items() if "/" not in name)
        return seconds | {UNTIMED: step - parts, STEP: step}


def compute_timing_metrics(
    timing_s: Mapping[str, float],
    num_prompt_tokens: int,
    num_response_tokens: int,
    num_sampled_tokens: int | None = None,
) -> dict[str, float]:
    """The metrics timing_s/{name}, and timing_per_token_ms/{name} of phases whose time is proportional to tokens.

    timing_per_token_ms: wall milliseconds of the phase over the tokens of the whole step on all devices: sampled tokens
    (None: all of the responses) for gen, prompt + response tokens for the others. Absent when there are no such tokens.
    """
    metrics = {f"timing_s/{name}": float(seconds) for name, seconds in timing_s.items()}
    num_tokens = num_prompt_tokens + num_response_tokens
    num_sampled = num_response_tokens if num_sampled_tokens is None else num_sampled_tokens
    for phases, count in ((SAMPLED_TOKEN_PHASES, num_sampled), (ALL_TOKEN_PHASES, num_tokens)):
        for name in phases:
            if name in timing_s and count > 0:
                metrics[f"timing_per_token_ms/{name}"] = timing_s[name] * 1000.0 / count
    return metrics


def compute_throughput_metrics(num_tokens: int, time_per_step_s: float, num_devices: int) -> dict[str, float]:
    """The metrics perf/total_num_tokens, time_per_step (s), throughput (tokens/s per device) and cpu_memory_used_gb.

    num_tokens: prompt + response tokens of all samples of the step.  cpu_memory_used_gb: GiB used on this node.
    """
    if time_per_step_s <= 0 or num_devices < 1:
        raise ValueError(f"throughput over {time_per_step_s} s on {num_devices} devices: both must be positive")
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": float(time_per_step_s),
        "perf/throughput": num_tokens / (time_per_step_s * num_devices),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 1024**3,
    }
