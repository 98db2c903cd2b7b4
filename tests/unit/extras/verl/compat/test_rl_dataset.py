from __future__ import annotations

import numpy as np
import pytest
import torch

from scalerl.extras.verl.compat import collate_fn


def test_tensors_are_stacked_and_the_rest_are_object_arrays():
    rows = [{"ids": torch.tensor([i, i + 1]), "messages": [i, i], "info": {"i": i}, "text": f"t{i}"} for i in range(3)]
    batch = collate_fn(rows)
    assert list(batch) == ["ids", "messages", "info", "text"]
    assert torch.equal(batch["ids"], torch.tensor([[0, 1], [1, 2], [2, 3]]))
    for key in ("messages", "info", "text"):
        assert isinstance(batch[key], np.ndarray) and batch[key].dtype == object and batch[key].shape == (3,)
        assert list(batch[key]) == [row[key] for row in rows]


def test_no_rows():
    assert collate_fn([]) == {}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"a": 1, "b": 2}, {"a": 1}, {"b": 1, "a": 2}, {"a": 3}], r"key 'b' is missing in rows \[1, 3\] of 4"),
        ([{"a": torch.zeros(2)}, {"a": 1}], r"key 'a' is a tensor in some rows, but not in rows \[1\]"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], r"key 'a' is \(2,\).*\(3,\) torch.float32 in row 1"),
        ([{"a": torch.zeros(2)}, {"a": torch.zeros(2).long()}], r"torch.int64 in row 1"),
    ],
)
def test_rows_that_differ_are_named(rows, words):
    with pytest.raises(ValueError, match=words):
        collate_fn(rows)
