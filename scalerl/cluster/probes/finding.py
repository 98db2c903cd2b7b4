"""`Finding`, which a probe returns, and `side_by_side`, which makes several probes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

AT_A_TIME = 4


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    ok: False where a run would fail, be slower or lack something.  value: what was found.  meaning: for a run; where
    ok is False also what to do.  needed: a run on this machine fails unless ok is True.
    """

    name: str
    ok: bool
    value: str
    meaning: str
    needed: bool = False

    @property
    def ends_a_run(self) -> bool:
        return self.needed and not self.ok

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        state = "ok" if self.ok else "FAILS" if self.needed else "no"
        return f"{self.name:<20} {state:<5} {self.value}; {self.meaning}"


def side_by_side(probes: Sequence[Callable[[], Finding]], at_a_time: int = AT_A_TIME) -> list[Finding]:
    """The findings in the order of the probes, of which some run at the same time."""
    with ThreadPoolExecutor(max_workers=at_a_time) as pool:
        return list(pool.map(lambda probe: probe(), probes))
