"""DataProto and Jagged: columns stay together through selecting, joining and pickling."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.batch.columns import INPUT_IDS, OLD_LOGPROBS, ROUTED_EXPERTS, UID
from scalerl.batch.data_proto import DataProto, Jagged, cu_seqlens_of

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def rows_of(lengths: list[int]) -> list[list[int]]:
    """Row i holds 100 * i + place."""
    return [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)]


def batch_of(lengths: list[int]) -> DataProto:
    rows = rows_of(lengths)
    uids = np.arange(len(lengths))
    extras = np.empty(len(lengths), dtype=object)
    extras[:] = [{"row": row} for row in range(len(lengths))]
    return DataProto(
        {
            "input_ids": Jagged.from_list(rows, torch.int64),
            "logprobs": Jagged.from_list([[-0.5 * value for value in row] for row in rows], torch.float32),
        },
        {"uid": uids, "extra": extras},
        {"step": 3},
    )


def as_lists(column: Jagged) -> list[list[float]]:
    return [column[row].tolist() for row in range(len(column))]


def assert_same(actual: DataProto, expected: DataProto) -> None:
    assert actual.tokens.keys() == expected.tokens.keys() and actual.samples.keys() == expected.samples.keys()
    for name, column in expected.tokens.items():
        assert actual.tokens[name].values.dtype == column.values.dtype
        assert as_lists(actual.tokens[name]) == as_lists(column)
    for name, column in expected.samples.items():
        assert actual.samples[name].tolist() == column.tolist()


@given(LENGTHS)
def test_jagged_holds_its_rows(lengths: list[int]) -> None:
    column = Jagged.from_list(rows_of(lengths), torch.int64)
    assert len(column) == len(lengths)
    assert column.lengths.tolist() == lengths
    assert as_lists(column) == rows_of(lengths)
    assert column.cu_seqlens.tolist() == np.concatenate([[0], np.cumsum(lengths)]).tolist()


def test_jagged_without_rows() -> None:
    column = Jagged.from_list([], torch.float32)
    assert len(column) == 0 and column.values.dtype == torch.float32 and column.cu_seqlens.tolist() == [0]


def test_cu_seqlens_are_int64() -> None:
    assert cu_seqlens_of([2, 0, 3]).dtype == torch.int64
    assert cu_seqlens_of([2, 0, 3]).tolist() == [0, 2, 2, 5]


@given(LENGTHS, st.data())
def test_select_takes_every_column(lengths: list[int], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10))
    selected = batch_of(lengths).select(picked)
    rows = rows_of(lengths)
    assert as_lists(selected.tokens["input_ids"]) == [rows[row] for row in picked]
    assert as_lists(selected.tokens["logprobs"]) == [[-0.5 * value for value in rows[row]] for row in picked]
    assert selected.samples["uid"].tolist() == picked
    assert [extra["row"] for extra in selected.samples["extra"]] == picked
    assert selected.meta == {"step": 3}


@given(LENGTHS, st.data())
def test_concat_undoes_select(lengths: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(lengths)))
    whole = batch_of(lengths)
    parts = [whole.select(range(cut)), whole.select(range(cut, len(lengths)))]
    assert_same(DataProto.concat(parts), whole)


@given(LENGTHS)
def test_pickling(lengths: list[int]) -> None:
    assert_same(pickle.loads(pickle.dumps(batch_of(lengths))), batch_of(lengths))


def test_an_unpickled_column_can_be_written() -> None:
    """Arrays from Ray's object store are read-only, out of band; torch must not write into them."""
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(Jagged.from_list([[1, 2]], torch.int64), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer) for buffer in buffers]
    column = pickle.loads(blob, buffers=frozen)
    column.values.add_(1)
    assert column.values.tolist() == [2, 3]
    assert pickle.loads(blob, buffers=frozen).values.tolist() == [1, 2]


def test_union_joins_columns() -> None:
    batch = batch_of([2, 3])
    left, right = DataProto({"input_ids": batch.tokens["input_ids"]}, meta={"a": 1}), DataProto(samples=batch.samples)
    joined = left.union(right)
    assert (
        joined.tokens.keys() == {"input_ids"} and joined.samples.keys() == {"uid", "extra"} and joined.meta == {"a": 1}
    )


def test_union_refuses_a_column_twice() -> None:
    with pytest.raises(ValueError, match=r"columns \['logprobs', 'uid'\] are in both batches"):
        batch = batch_of([2])
        batch.union(DataProto({"logprobs": batch.tokens["logprobs"]}, {"uid": batch.samples["uid"]}))


def test_union_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match="token columns differ in row 1: input_ids has 3, values has 4"):
        DataProto({"input_ids": batch_of([2, 3]).tokens["input_ids"]}).union(
            DataProto({"values": batch_of([2, 4]).tokens["input_ids"]})
        )


def test_concat_refuses_other_columns() -> None:
    batch = batch_of([2])
    with pytest.raises(ValueError, match="concat"):
        DataProto.concat([batch, DataProto({"input_ids": batch.tokens["input_ids"]})])


def test_columns_have_the_same_number_of_rows() -> None:
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'input_ids': 2, 'uid': 3\}"):
        DataProto({"input_ids": batch_of([1, 1]).tokens["input_ids"]}, {"uid": np.arange(3)})


def test_an_empty_batch_has_no_rows() -> None:
    assert len(DataProto()) == 0


def with_own_shapes() -> DataProto:
    """Experts of each token, and pictures, whose patches have nothing to do with the tokens; row 1 has no picture."""
    experts = [torch.arange(length * 6, dtype=torch.int32).view(length, 2, 3) for length in (3, 1, 2)]
    patches = [torch.full((count, 4), float(count)) for count in (5, 0, 7)]
    return batch_of([3, 1, 2]).union(
        DataProto(
            {
                "routed_experts": Jagged.from_list(experts, torch.int32),
                "patches": Jagged.from_list(patches, torch.float32, per_token=False),
            }
        )
    )


def test_a_column_has_a_shape_of_its_own() -> None:
    batch = with_own_shapes()
    halves = [batch.select([2]), batch.select([1, 0])]
    joined = DataProto.concat([pickle.loads(pickle.dumps(half)) for half in halves])
    for name, column in joined.tokens.items():
        assert column.per_token == (name != "patches")
        for row, before in enumerate([2, 1, 0]):
            assert torch.equal(column[row], batch.tokens[name][before])
    assert joined[ROUTED_EXPERTS].values.shape == (6, 2, 3) and joined.tokens["patches"].values.shape == (12, 4)
    assert batch.select([1]).tokens["patches"].values.shape == (0, 4)


@given(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=6))
def test_pictures_that_rows_have_in_common_are_pickled_once(places: list[int]) -> None:
    """2 and 3 differ in one value alone."""
    contents = [
        torch.zeros(0, 1000),
        torch.full((2, 1000), 1.0),
        torch.full((3, 1000), 2.0),
        torch.full((3, 1000), 2.0),
    ]
    contents[3][1, 1] = 3.0
    rows = [contents[place] for place in places]
    column = Jagged.from_list(rows, torch.float32, per_token=False)
    again = pickle.loads(blob := pickle.dumps(column))
    assert len(again) == len(rows) and not again.per_token
    assert all(torch.equal(again[row], rows[row]) for row in range(len(rows)))
    assert len(blob) < 2000 + 4000 * sum(len(contents[place]) for place in set(places))
    again.values.add_(1)


def test_experts_of_tokens_are_read_where_they_are_and_others_may_be_changed() -> None:
    """A column from the object store is read-only memory that the processes of a node share."""
    batch = with_own_shapes()
    states = {name: column.__getstate__() for name, column in batch.tokens.items()}
    for name, state in states.items():
        state["values"].flags.writeable = False
        column = object.__new__(Jagged)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            column.__setstate__(state)
        shares = column.values.data_ptr() == state["values"].ctypes.data
        assert shares is (name == "routed_experts") and torch.equal(column.values, batch.tokens[name].values)


def test_a_column_is_asked_for_by_what_it_is() -> None:
    batch = with_own_shapes()
    assert batch[INPUT_IDS] is batch.tokens["input_ids"] and batch[UID] is batch.samples["uid"]
    with pytest.raises(KeyError, match=r"no old_logprobs \[T\]; it has .*'patches'"):
        batch[OLD_LOGPROBS]
