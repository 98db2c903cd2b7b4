from __future__ import annotations

import itertools

import pytest

from scalerl.rollout.sync.session import SyncOrder, WrongOrderError

WHOLE = [
    *("drain", "release_kv", "release_weights", "resume_weights"),
    *("begin", "bucket", "bucket", "end", "check", "resume_kv", "continue"),
]


def after(steps: list[str], **options: bool) -> SyncOrder:
    order = SyncOrder("server", **options)
    for step in steps:
        order.advance(step)
    return order


@pytest.mark.parametrize(
    "steps",
    [
        WHOLE,
        ["drain", "begin", "bucket", "end", "continue"],
        ["drain", "release_kv", "begin", "bucket", "end", "check", "resume_kv", "continue"],
        # Nothing was updated: the server samples on with what it has.
        ["drain", "release_kv", "resume_kv", "continue"],
        ["drain", "continue"],
    ],
)
def test_a_right_order_ends_where_it_began(steps: list[str]) -> None:
    order = after(steps * 2)
    assert (order.state, order.allowed) == ("serving", ("drain",))


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_after_every_step_all_but_the_allowed_are_refused_and_change_nothing(length: int) -> None:
    order = after(WHOLE[:length])
    state, allowed = order.state, order.allowed
    assert WHOLE[length] in allowed
    for step in set(WHOLE) - set(allowed):
        with pytest.raises(WrongOrderError) as caught:
            order.advance(step)
        assert f"server: {step} is out of order. State: {state}. Allowed now: {', '.join(allowed)}" in str(caught.value)
        assert (order.state, order.allowed) == (state, allowed)


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        # Running requests would mix two policies in one sample, and lose their cache.
        ([], "begin"),
        ([], "release_kv"),
        # SGLang refuses it.
        (["drain"], "bucket"),
        (["drain", "begin"], "begin"),
        # An update without a tensor is none.
        (["drain", "begin"], "end"),
        # SGLang's scheduler dies of it.
        (["drain"], "resume_kv"),
        # Trainer's state and the server's cache never at once.
        (["drain"], "release_weights"),
        (["drain", "release_kv", "release_weights"], "resume_kv"),
        # Nowhere to load to.
        (["drain", "release_kv", "release_weights"], "begin"),
        # Undefined weights would be sampled from.
        (["drain", "release_kv", "release_weights", "resume_weights"], "resume_kv"),
        (["drain", "begin", "bucket"], "continue"),
        (["drain", "begin", "bucket"], "check"),
        (["drain"], "check"),
    ],
)
def test_what_each_rule_is_for(before: list[str], wrong: str) -> None:
    with pytest.raises(WrongOrderError):
        after(before).advance(wrong)


def test_whatever_is_allowed_nothing_samples_undefined_weights() -> None:
    """All sequences of up to nine allowed steps."""
    num_sequences = 0
    frontier: list[list[str]] = [[]]
    for _ in range(9):
        frontier = [[*steps, step] for steps in frontier for step in after(steps).allowed]
        for steps in frontier:
            if steps[-1] != "continue":
                continue
            num_sequences += 1
            since = list(itertools.takewhile(lambda step: step != "drain", reversed(steps)))
            assert since.count("release_kv") == since.count("resume_kv")
            assert since.count("release_weights") == since.count("resume_weights")
            lost = min((since.index(step) for step in ("release_weights", "begin") if step in since), default=None)
            assert lost is None or "end" in since[:lost]
    assert num_sequences > 20


def test_a_drained_server_may_be_updated_at_once() -> None:
    assert "begin" in SyncOrder("server", serving=False).allowed
