"""rearrange_micro_batches and get_reverse_idx on one rank (over ranks: tests/dist)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerl.extras.verl.compat import get_reverse_idx, rearrange_micro_batches

WIDTH = 12


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    return {
        "attention_mask": mask,
        "input_ids": torch.arange(len(lengths) * WIDTH).view(-1, WIDTH) * mask,
        "score": torch.arange(len(lengths), dtype=torch.float32),
    }


lengths_lists = st.lists(st.integers(0, WIDTH), min_size=1, max_size=24)


@given(
    lengths=lengths_lists,
    cap=st.integers(WIDTH, 40),
    minimum=st.none() | st.integers(1, 9),
    multiple=st.none() | st.integers(1, 4),
    balance=st.booleans(),
)
def test_laws(lengths, cap, minimum, multiple, balance):
    batch = padded(lengths)
    micros, indices = rearrange_micro_batches(
        batch, cap, min_num_micro_batch=minimum, num_batches_divided_by=multiple, use_dynamic_bsz_balance=balance
    )
    assert len(micros) == len(indices) >= (minimum or 1)
    assert len(micros) % (multiple or 1) == 0
    assert all(int(micro["attention_mask"].sum()) <= cap for micro in micros)
    # Empty micro-batches only where rows run out.
    assert sum(not rows for rows in indices) == max(0, len(micros) - len(lengths))
    flat = [row for rows in indices for row in rows]
    assert sorted(flat) == list(range(len(lengths)))
    # Every column follows its rows; the reverse index restores the batch.
    for name, column in batch.items():
        joined = torch.cat([micro[name] for micro in micros])
        assert torch.equal(joined, column[flat])
        assert torch.equal(joined[get_reverse_idx(flat)], column)


def test_the_cap_holds_where_average_packing_breaks_it():
    micros, _ = rearrange_micro_batches(padded([7] * 8), 8 + 4)
    assert [int(micro["attention_mask"].sum()) for micro in micros] == [7] * 8


def test_as_few_as_possible_and_balanced():
    micros, _ = rearrange_micro_batches(padded([6, 5, 4, 3, 2, 1]), 12)
    assert sorted(int(micro["attention_mask"].sum()) for micro in micros) == [10, 11]
    micros, _ = rearrange_micro_batches(padded([6, 5, 4, 3, 2, 1]), 12, min_num_micro_batch=3)
    assert [int(micro["attention_mask"].sum()) for micro in micros] == [7, 7, 7]


def test_without_balance_the_packing_fills_up():
    micros, _ = rearrange_micro_batches(
        padded([12, *[1] * 12]), 13, use_dynamic_bsz_balance=False, min_num_micro_batch=2
    )
    sums = sorted(int(micro["attention_mask"].sum()) for micro in micros)
    assert sums == [12, 12]


def test_padded_width_over_the_cap_is_fine():
    micros, _ = rearrange_micro_batches(padded([3, 3]), 6)
    assert len(micros) == 1


def test_an_empty_batch_is_one_empty_micro_batch():
    micros, indices = rearrange_micro_batches({"attention_mask": torch.zeros(0, WIDTH)}, 6)
    assert indices == [[]]
    assert micros[0]["attention_mask"].shape == (0, WIDTH)


def test_works_on_what_is_indexed_like_a_tensor_dict():
    class Rows:
        def __init__(self, mask: torch.Tensor) -> None:
            self.mask = mask

        def __getitem__(self, key):
            return self.mask if isinstance(key, str) else Rows(self.mask[key])

    micros, indices = rearrange_micro_batches(Rows(padded([5, 5, 2])["attention_mask"]), 7)
    assert all(isinstance(micro, Rows) for micro in micros)
    assert [micro.mask.sum(1).tolist() for micro in micros] == [[[5, 5, 2][row] for row in rows] for rows in indices]


def test_a_tensordict_gives_tensordicts():
    """They are mappings too, and indexing keeps what else they hold."""
    from tensordict import NonTensorData, TensorDict

    columns = padded([5, 5, 2, 4])
    batch = TensorDict(columns | {"nested": {"score": columns["score"]}}, batch_size=[4])
    batch["name"] = NonTensorData(list("abcd"), batch_size=[4])
    micros, indices = rearrange_micro_batches(batch, 7, min_num_micro_batch=5)
    assert [micro.batch_size for micro in micros] == [torch.Size([len(rows)]) for rows in indices]
    assert all(isinstance(micro, TensorDict) for micro in micros)
    for micro, rows in zip(micros, indices, strict=True):
        assert torch.equal(micro["input_ids"], columns["input_ids"][rows])
        assert torch.equal(micro["nested", "score"], columns["score"][rows])
    joined = torch.cat(micros)[get_reverse_idx([row for rows in indices for row in rows])]
    assert torch.equal(joined["input_ids"], columns["input_ids"])


def test_a_row_over_the_cap_is_named():
    with pytest.raises(ValueError, match=r"row 1 has 9 tokens, over max_token_len=8: raise it to at least 11"):
        rearrange_micro_batches(padded([8, 9, 11]), 8)


@given(st.permutations(range(9)))
def test_reverse_idx_inverts(idx_map):
    reverse = get_reverse_idx(tuple(idx_map))
    assert isinstance(reverse, list)
    assert [idx_map[i] for i in reverse] == list(range(9))
    np.testing.assert_array_equal(reverse, np.argsort(idx_map))


@pytest.mark.parametrize("bad", [[0, 0], [0, 2], [-1, 0]])
def test_reverse_idx_refuses_what_is_no_permutation(bad):
    with pytest.raises(ValueError, match=r"not a permutation of 0\.\.1"):
        get_reverse_idx(bad)


def test_reverse_idx_of_nothing():
    assert get_reverse_idx([]) == []
