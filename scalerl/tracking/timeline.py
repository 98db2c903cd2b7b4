"""The timeline of a run: who did what, from when to when. Each process records its own spans; the driver logs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Spans that a process keeps which nobody takes.
_MAX_SPANS = 1000


class Span(NamedTuple):
    """What somebody did.  begin_s, end_s: seconds since 1970.  about: numbers of it, such as tokens; never a text."""

    who: str
    what: str
    begin_s: float
    end_s: float
    about: dict[str, int] = {}  # noqa: RUF012  # never changed

    def as_list(self) -> list[Any]:
        """The span for a line of JSON; `Span(*list)` is the span again, to a tenth of a millisecond."""
        return [self.who, self.what, round(self.begin_s, 4), round(self.end_s, 4), self.about]

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Spans:
    """Records the spans of one process, or of a part of it: `with spans("update"):`.  who: as `Span`."""

    def __init__(self, who: str = "") -> None:
        self.who = who
        self._ended: deque[Span] = deque(maxlen=_MAX_SPANS)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.time()
        try:
            yield
        finally:
            self.add(what, began, time.time())

    def add(self, what: str, begin_s: float, end_s: float, **about: int) -> None:
        """Records a span that has ended."""
        self._ended.append(Span(self.who, what, begin_s, end_s, about))

    def pop(self) -> list[Span]:
        """Returns the spans since the last call, and forgets them."""
        spans = list(self._ended)
        self._ended.clear()
        return spans
