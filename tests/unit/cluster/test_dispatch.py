"""What @register refuses, and what it leaves of the method."""

from __future__ import annotations

from typing import Any

import pytest

from scalerl.cluster.dispatch import Dispatch, DispatchMode, Execute, Future, register, registration_of


def as_given(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def first(group: Any, values: list[Any]) -> Any:
    return values[0]


@pytest.mark.parametrize(
    "mode",
    [
        {"dispatch_fn": as_given},
        {"dispatch_fn": as_given, "collect_fn": "first"},
        {"dispatch_fn": as_given, "collect_fn": first, "execute_fn": first},
        "ONE_TO_ALL",
    ],
)
def test_a_mode_that_is_none(mode: Any) -> None:
    with pytest.raises(
        ValueError, match=r"dispatch_mode=.*'ONE_TO_ALL'.*or a dict of the functions dispatch_fn and coll"
    ):
        register(mode)


def test_rank_zero_has_no_part_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"^DP_COMPUTE_PROTO gives every rank its part; set execute_mode=Execute.ALL$"):
        register(Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_the_method_stays_the_function_that_it_was() -> None:
    def method(self: Any, number: int) -> int:
        return number + 1

    marked = register(DispatchMode(dispatch_fn=as_given, collect_fn=first), blocking=False)(method)
    assert marked is method and method(None, 1) == 2
    assert not registration_of(marked).blocking and registration_of(marked).execute_mode is Execute.ALL


def test_a_future_waits_once() -> None:
    calls: list[int] = []
    future = Future(lambda: calls.append(1) or "result")
    assert calls == []
    assert future.get() == future.get() == "result" and calls == [1]
