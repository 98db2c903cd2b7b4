"""`@register`: how a method of a worker is called through its group."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeVar

_ATTRIBUTE = "scalerl_dispatch"
Method = TypeVar("Method", bound=Callable)


class Dispatch(Enum):
    """What each rank gets, and what the group returns."""

    # Rank 0 alone runs; its value.
    RANK_ZERO = auto()
    # Every rank gets the same arguments; the list of their values in rank order.
    ONE_TO_ALL = auto()
    # The first argument is a ShardedBatch: every rank gets its dp rank's part. The method returns (metrics, columns);
    # the group returns the merged metrics and, per dp rank, a reference to the columns of its output rank.
    DP_COMPUTE_PROTO = auto()


def register(dispatch_mode: Dispatch) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        setattr(method, _ATTRIBUTE, dispatch_mode)
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Dispatch]:
    """Names and modes of the methods of `cls` that carry @register."""
    found = {}
    for name in dir(cls):
        mode = getattr(getattr(cls, name), _ATTRIBUTE, None)
        if mode is not None:
            found[name] = mode
    return found
