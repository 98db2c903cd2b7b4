from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scalerl.rollout.dispatcher import ServerChooser, max_in_flight


def loads(chooser: ServerChooser) -> list[tuple[int, int]]:
    """The tokens and samples in flight on each server."""
    return [(server.num_tokens, server.num_samples) for server in chooser.servers]


def test_the_server_that_owes_the_fewest_tokens_is_next_and_ties_go_to_the_lowest_index() -> None:
    chooser = ServerChooser([10, 10, 10])
    assert [chooser.assign(prompt, 2, 20) for prompt in "abc"] == [0, 1, 2]
    chooser.give_back(1, 2, 20)
    assert chooser.assign("d", 1, 50) == 1  # [20, 0, 20]
    assert chooser.assign("e", 1, 5) == 0  # [20, 50, 20]
    assert chooser.assign("f", 1, 5) == 2  # [25, 50, 20]
    assert loads(chooser) == [(25, 3), (50, 1), (25, 3)]


def test_fewer_samples_win_where_tokens_tie() -> None:
    chooser = ServerChooser([10, 10])
    chooser.assign("a", 4, 40)
    chooser.assign("b", 2, 40)
    assert chooser.assign("c", 1, 1) == 1


def test_a_prompt_goes_where_it_went_before_while_there_is_room() -> None:
    chooser = ServerChooser([4, 4])
    assert chooser.assign("a", 2, 100) == 0
    assert chooser.assign("b", 1, 1) == 1
    assert chooser.assign("a", 2, 100) == 0  # server 1 owes less, but has not the prompt
    assert chooser.assign("a", 2, 100) == 1  # no room at home: this is the new one
    chooser.give_back(0, 2, 100)
    chooser.give_back(0, 2, 100)
    assert chooser.assign("a", 1, 1) == 1


def test_no_server_takes_more_than_it_runs_at_a_time() -> None:
    chooser = ServerChooser([3, 3])
    assert [chooser.assign(i, 2, 2) for i in range(3)] == [0, 1, None]
    chooser.give_back(1, 2, 2)
    assert chooser.assign("large", 9, 9) == 1  # alone
    assert chooser.assign("small", 1, 1) == 0
    assert chooser.assign("small 2", 1, 1) is None


def test_a_lost_server_takes_nothing() -> None:
    chooser = ServerChooser([9, 9])
    assert chooser.assign("a", 1, 5) == 0
    chooser.servers[0].alive = False
    assert [chooser.assign("a", 1, 5), chooser.assign("b", 1, 5)] == [1, 1]
    chooser.servers[1].alive = False
    assert chooser.assign("a", 1, 5) is None
    chooser.servers[0].alive = True
    assert chooser.assign("a", 1, 5) == 0


@given(
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 99), st.booleans()), max_size=60),
)
def test_loads_are_what_was_taken_and_not_given_back(
    limits: list[int], steps: list[tuple[int, int, int, bool]]
) -> None:
    chooser, held = ServerChooser(limits), []
    for prompt, num_samples, num_tokens, back in steps:
        if back and held:
            chooser.give_back(*held.pop(0))
        server = chooser.assign(prompt, num_samples, num_tokens)
        if server is None:
            assert all(sum(h[1] for h in held if h[0] == i) + num_samples > limits[i] for i in range(len(limits)))
        else:
            held.append((server, num_samples, num_tokens))
    expected = [
        (sum(h[2] for h in held if h[0] == i), sum(h[1] for h in held if h[0] == i)) for i in range(len(limits))
    ]
    assert loads(chooser) == expected


def test_a_fifth_of_what_a_server_has_may_wait_there() -> None:
    assert [max_in_flight(count) for count in (1, 3, 4, 32, 256)] == [1, 3, 5, 40, 320]
