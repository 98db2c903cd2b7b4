"""Turns of rows, against plain loops: an episode earns the same whatever rows its turns are divided into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.batch.jagged import Jagged
from scalerl.batch.turns import Turns, column_of

# Of each row: the episode begins here; (tokens of a turn, its reward, observed tokens before it).
TURN = st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, -1.0, 2.0]), st.integers(0, 2))
ROWS = st.lists(st.tuples(st.booleans(), st.lists(TURN, max_size=3)), max_size=8)
Rows = list[tuple[bool, list[tuple[int, float, int]]]]


def columns_of(rows: Rows) -> dict[str, np.ndarray]:
    """The n-th episode earns n + 0.25 in all."""
    episode_S = np.cumsum([begins or row == 0 for row, (begins, _) in enumerate(rows)]).astype(int)
    return {
        "uid": np.zeros(len(rows), int),
        "sample_index": episode_S,
        "rewards": episode_S + 0.25,
        "turn_lengths": column_of([[length for length, *_ in turns] for _, turns in rows]),
        "turn_rewards": column_of([[reward for _, reward, _ in turns] for _, turns in rows]),
    }


def mask_of(rows: Rows) -> Jagged:
    """A prompt of one token, the turns with what is observed before each, and an observation at the end."""
    masks = [
        [0] + [is_sampled for length, _, seen in turns for is_sampled in [0] * seen + [1] * length] + [0]
        for _, turns in rows
    ]
    return Jagged.from_list(masks, torch.bool)


@given(ROWS, st.sampled_from([1.0, 0.5]))
def test_returns_and_numbers_are_those_of_a_loop_over_episodes(rows: Rows, gamma: float) -> None:
    samples = columns_of(rows)
    turns, expected, numbers = Turns.of(samples), [], []
    for episode in dict.fromkeys(samples["sample_index"].tolist()):
        of_rows = samples["turn_rewards"][samples["sample_index"] == episode]
        rewards = [reward for row in of_rows for reward in row]
        own = episode + 0.25 - sum(rewards)
        # The reward that is no turn's comes with the last turn's.
        after = [*rewards[:-1], rewards[-1] + own] if rewards else []
        expected += [sum(r * gamma**ahead for ahead, r in enumerate(after[at:])) for at in range(len(rewards))]
        numbers += range(len(rewards))
    assert turns.returns(samples, gamma) == pytest.approx(expected)
    assert turns.numbers(turns.before_rows(samples)).tolist() == numbers


@given(ROWS)
def test_a_rank_puts_turns_on_tokens_as_a_loop_does(rows: Rows) -> None:
    """Rows in any order, as on a rank: numbers go on from the rows before, wherever these are."""
    samples, mask = columns_of(rows), mask_of(rows)
    whole = Turns.of(samples)
    before_S = whole.before_rows(samples)
    order = list(reversed(range(len(rows))))
    samples = {name: column[order] for name, column in samples.items()}
    mask, turns = mask.select(order), Turns.of(samples)
    numbers_T = turns.on_tokens(turns.numbers(before_S[order]), mask, elsewhere=-1)
    rewards_T = turns.rewards_on_tokens(mask)
    at = 0
    for row in order:
        numbers, rewards, last = [-1], [0.0], None
        for number, (length, reward, seen) in enumerate(rows[row][1], start=int(before_S[row])):
            numbers += [-1] * seen + [number] * length
            rewards += [0.0] * (seen + length)
            last = len(rewards) - 1 if length else last
            if last is not None:
                rewards[last] += reward
        assert numbers_T[at : at + len(numbers) + 1].tolist() == [*numbers, -1]
        assert rewards_T[at : at + len(numbers) + 1].tolist() == [*rewards, 0.0]
        at += len(numbers) + 1
    assert at == len(mask.values)


@given(ROWS)
def test_all_rewards_that_come_after_a_token_are_its_own_row_s_and_the_rest(rows: Rows) -> None:
    samples = columns_of(rows)
    turns = Turns.of(samples)
    after_S, undiscounted_K = turns.rewards_after_rows(samples), turns.returns(samples, 1.0)
    for turn, row in enumerate(turns.rows_K):
        later = [other for other in range(turn, len(turns.rows_K)) if turns.rows_K[other] == row]
        of_row = sum(turns.rewards_K[other] for other in later) + after_S[row]
        # The turns of a row are the last of the episode, or turns of other rows follow.
        assert undiscounted_K[turn] == pytest.approx(of_row)


def test_without_rewards_of_turns_nothing_changes() -> None:
    samples = columns_of([(True, [(2, 0.0, 0), (1, 0.0, 1)]), (False, [(1, 0.0, 0)])])
    turns = Turns.of(samples)
    assert turns.rewards_after_rows(samples).tobytes() == samples["rewards"].tobytes()
    assert turns.returns(samples, 1.0).tolist() == [1.25] * 3
    assert turns.of_rows(turns.returns(samples, 0.5)).tolist() == [(0.3125, 0.625), (1.25,)]
