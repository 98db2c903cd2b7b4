"""Rows that have one score: counted once, compared once, whatever the rows are divided into."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalerl.batch import episodes

# (number of rows, agent) of each episode of a sample; agents of a sample differ.
SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from("abc")), min_size=1, max_size=3, unique_by=lambda e: e[1]
        ),
    ),
    max_size=8,
)


def columns_of(
    made: list[tuple[int, list[tuple[int, str]]]],
) -> tuple[dict[str, np.ndarray], list[tuple[int, int, str]]]:
    """A step with these samples, and (uid, sample, agent) of each episode."""
    rows: list[tuple[int, int, str]] = []
    names: list[tuple[int, int, str]] = []
    for index, (uid, of_sample) in enumerate(sorted(made, key=lambda sample: sample[0])):
        for count, agent in of_sample:
            names.append((uid, index, agent))
            rows += [names[-1]] * count
    uids, indices, agents = (
        (np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0, int),) * 3
    )
    columns = {"uid": uids, "sample_index": indices, "agent": agents.astype(object)}
    return columns | {"num_turns": np.arange(len(rows)), "score": np.arange(len(rows)) / 2}, names


@given(SAMPLES)
def test_episodes_are_found_again(made: list[tuple[int, list[tuple[int, str]]]]) -> None:
    columns, names = columns_of(made)
    episode_S = episodes.of_rows(columns)
    rows = list(zip(columns["uid"].tolist(), columns["sample_index"].tolist(), columns["agent"].tolist(), strict=True))
    assert [names[episode] for episode in episode_S] == rows
    of_episodes = episodes.columns(columns)
    for episode, first in enumerate(episodes.starts(columns).tolist()):
        assert first == episode_S.tolist().index(episode) and of_episodes["score"][episode] == columns["score"][first]
        assert of_episodes["num_turns"][episode] == columns["num_turns"][episode_S == episode].sum()
    starts = episodes.sample_starts(columns).tolist()
    assert [rows[start][:2] for start in starts] == list(dict.fromkeys(row[:2] for row in rows))
    groups_S = episodes.groups(columns).tolist()
    assert len({(group, row[0], row[2]) for group, row in zip(groups_S, rows, strict=True)}) == len(set(groups_S))


@given(SAMPLES)
def test_rows_that_are_samples_are_left_as_they_are(made: list[tuple[int, list[tuple[int, str]]]]) -> None:
    columns, _ = columns_of([(uid, [(1, "")]) for uid, _ in made])
    assert episodes.starts(columns).tolist() == list(range(len(made))) == episodes.of_rows(columns).tolist()
    assert episodes.groups(columns) is columns["uid"]
    assert all((column == columns[name]).all() for name, column in episodes.columns(columns).items())
