"""verl's DataProto on jagged columns: rows stay together through all that is done with them, as written out here."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.batch import data_proto as protocol
from scalerl.batch.data_proto import Jagged
from scalerl.extras.verl.compat import DataProto, DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=7)


def batch_of(lengths: list[int]) -> DataProto:
    """Row i: tokens 10 i, 10 i + 1, ...; score i; uid "ui"."""
    rows = [[10 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    return DataProto.from_dict(
        {"input_ids": Jagged.from_list(rows, torch.int64), "score": torch.arange(len(lengths)).float()},
        {"uid": [f"u{row}" for row in range(len(lengths))], "extra": [{"row": row} for row in range(len(lengths))]},
        {"step": 3},
    )


def rows_of(batch: DataProto) -> list[tuple[list[int], float, str, int]]:
    tokens, scores = batch.batch["input_ids"], batch.batch["score"]
    return [
        (
            tokens[row].tolist(),
            float(scores[row]),
            batch.non_tensor_batch["uid"][row],
            batch.non_tensor_batch["extra"][row]["row"],
        )
        for row in range(len(batch))
    ]


ABC = [([0, 1], 0.0, "u0", 0), ([10], 1.0, "u1", 1), ([20, 21, 22], 2.0, "u2", 2)]


def test_rows_by_number_slice_list_and_mask():
    batch = batch_of([2, 1, 3])
    assert len(batch) == 3 and rows_of(batch) == ABC and batch.batch.batch_size == torch.Size([3])
    assert rows_of(batch[1:]) == ABC[1:] and rows_of(batch[::-1]) == ABC[::-1] and rows_of(batch[-1:]) == ABC[2:]
    assert rows_of(batch[[2, 0]]) == rows_of(batch[np.array([2, 0])]) == rows_of(batch[torch.tensor([2, 0])])
    assert rows_of(batch.select_idxs([2, 0])) == [ABC[2], ABC[0]]
    assert rows_of(batch.select_idxs([True, False, True])) == [ABC[0], ABC[2]]
    assert rows_of(batch.select_idxs([])) == [] and batch.slice(1, 2).meta_info == {"step": 3}
    item = batch[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["input_ids"].tolist() == [20, 21, 22] and item.non_tensor_batch["uid"] == "u2"
    with pytest.raises(IndexError):
        batch[3]
    with pytest.raises(ValueError, match="does not fit 3 rows"):
        batch.select_idxs([True, False])


def test_repeat():
    batch = batch_of([2, 1])
    a, b = ABC[:2]
    assert rows_of(batch.repeat(2)) == rows_of(batch.repeat(2, interleave=True)) == [a, a, b, b]
    assert rows_of(batch.repeat(repeat_times=2, interleave=False)) == [a, b, a, b]
    assert rows_of(batch.sample_level_repeat([0, 3])) == [b, b, b]
    with pytest.raises(ValueError, match="3 numbers of times for 2 rows"):
        batch.sample_level_repeat([1, 1, 1])


def test_chunk_and_split():
    batch = batch_of([2, 1, 3, 0])
    assert [rows_of(part) for part in batch.chunk(2)] == [rows_of(batch[:2]), rows_of(batch[2:])]
    assert [len(part) for part in batch.split(3)] == [3, 1]
    for wrong in (3, 0):
        with pytest.raises(ValueError, match=f"4 rows do not make {wrong} equal chunks; pad them"):
            batch.chunk(wrong)


def test_concat():
    batch = batch_of([2, 1, 3])
    parts = [batch[:1], batch[1:]]
    joined = DataProto.concat(parts)
    assert rows_of(joined) == ABC and joined.meta_info == {"step": 3}
    parts[1].meta_info = {"step": 4}
    with pytest.raises(ValueError, match=r"meta_info\['step'\] differs: 3 and 4"):
        DataProto.concat(parts)
    with pytest.raises(ValueError, match=r"columns \['uid'\] are not in all batches"):
        DataProto.concat([batch, batch.select(non_tensor_batch_keys=["extra"])])
    with pytest.raises(ValueError, match="column 'input_ids' is of different kinds"):
        other = batch_of([1])
        other.batch["input_ids"] = torch.zeros(1, 4, dtype=torch.int64)
        DataProto.concat([batch, other])


@pytest.mark.parametrize(
    ("metrics", "joined"),
    [
        # Of every worker, whether it gives a list of dicts, one dict or none.
        (([{"loss": 0.5, "acc": 0.9}], [{"loss": 0.6, "acc": 0.8}]), {"loss": [0.5, 0.6], "acc": [0.9, 0.8]}),
        (({"loss": 0.5, "acc": 0.9}, {"loss": 0.6, "acc": 0.8}), {"loss": [0.5, 0.6], "acc": [0.9, 0.8]}),
        (([{"loss": 0.5}, {"loss": 0.7}], {"loss": 0.6}), {"loss": [0.5, 0.7, 0.6]}),
        ((..., [{"loss": 0.6}]), {"loss": [0.6]}),
        (([{"loss": 0.5}], ...), {"loss": [0.5]}),
        ((None, {"loss": 0.6}), {"loss": [0.6]}),
        ((None, ...), None),
        (([], []), None),
    ],
)
def test_concat_makes_verls_dict_of_lists_of_metrics(metrics: tuple[Any, Any], joined: dict[str, list[float]] | None):
    parts = [
        DataProto.from_dict(
            {"obs": torch.tensor([row])}, meta_info={"flag": True} | ({} if it is ... else {"metrics": it})
        )
        for row, it in enumerate(metrics)
    ]
    whole = DataProto.concat(parts)
    assert whole.batch["obs"].tolist() == [0, 1]
    assert whole.meta_info == {"flag": True} | ({} if joined is None else {"metrics": joined})


def test_concat_keeps_what_any_batch_has_in_meta_info():
    parts = [DataProto.from_dict({"a": torch.ones(1)}, meta_info={"shared": "x", f"of{row}": row}) for row in range(3)]
    assert DataProto.concat(parts).meta_info == {"shared": "x", "of0": 0, "of1": 1, "of2": 2}
    parts[2].meta_info["metrics"] = [0.5]
    with pytest.raises(ValueError, match=r"meta_info\['metrics'\] has 0.5, which is no dict"):
        DataProto.concat(parts)


def test_reorder_is_in_place_and_wants_every_row_once():
    batch = batch_of([2, 1, 3])
    batch.reorder(torch.tensor([2, 0, 1]))
    assert rows_of(batch) == [ABC[2], ABC[0], ABC[1]]
    with pytest.raises(ValueError, match="is no order of 3 rows"):
        batch.reorder([0, 0, 1])


def test_select_pop_and_rename():
    batch = batch_of([2, 1, 3])
    picked = batch.select(["score"], ["uid"], [])
    assert (set(picked.batch), set(picked.non_tensor_batch), picked.meta_info) == ({"score"}, {"uid"}, {})
    copied = batch.select(deepcopy=True)
    copied.batch["score"].add_(5)
    assert batch.batch["score"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(KeyError, match="has no answer; it has"):
        batch.pop(["score", "answer"])
    assert "score" in batch.batch
    popped = batch.pop(batch_keys=["score"], non_tensor_batch_keys=["extra"], meta_info_keys=["step"])
    assert set(batch.batch) == {"input_ids"} and set(batch.non_tensor_batch) == {"uid"} and batch.meta_info == {}
    assert popped.batch["score"].tolist() == [0.0, 1.0, 2.0] and popped.meta_info == {"step": 3}
    assert batch.rename("input_ids", "ids") is batch and set(batch.batch) == {"ids"}
    batch.rename(["ids"], ["tokens"])
    assert set(batch.batch) == {"tokens"}
    with pytest.raises(ValueError, match="2 names, 1 new ones"):
        batch.rename(["a", "b"], ["c"])


def test_union_is_in_place_and_refuses_other_values():
    batch = batch_of([2, 1, 3])
    other = DataProto.from_dict(
        {"reward": torch.ones(3), "score": torch.arange(3).float()}, {"uid": ["u0", "u1", "u2"]}
    )
    assert batch.union(other) is batch and batch.batch["reward"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"\['score', 'uid'\] differ"):
        batch.union(DataProto.from_dict({"score": torch.ones(3)}, {"uid": ["x", "u1", "u2"]}))
    with pytest.raises(ValueError, match=r"\['input_ids'\] differ"):
        batch.union(DataProto.from_dict({"input_ids": batch_of([2, 1, 2]).batch["input_ids"]}))
    with pytest.raises(ValueError, match=r"\['step'\] differ"):
        batch.union(DataProto(meta_info={"step": 4}))
    with pytest.raises(ValueError, match="different numbers of rows"):
        batch.union(DataProto.from_dict({"other": torch.ones(2)}))


def test_make_iterator():
    batch = batch_of([2, 1, 3, 0])
    plain = [rows_of(mini) for mini in batch.make_iterator(2, epochs=2)]
    assert plain == [rows_of(batch[:2]), rows_of(batch[2:])] * 2
    shuffled = [
        [uid for mini in batch.make_iterator(1, 3, seed, {"shuffle": True}) for uid in mini.non_tensor_batch["uid"]]
        for seed in (7, 7, 8)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert all(sorted(shuffled[0][start : start + 4]) == ["u0", "u1", "u2", "u3"] for start in (0, 4, 8))
    with pytest.raises(ValueError, match="4 rows do not make mini-batches of 3"):
        batch.make_iterator(3, 1)
    with pytest.raises(ValueError, match=r"\['sampler'\] are not known"):
        batch.make_iterator(2, 1, dataloader_kwargs={"sampler": None})


@given(LENGTHS, st.integers(1, 9))
def test_padding_to_a_divisor_takes_the_first_rows_again(lengths: list[int], divisor: int):
    batch = batch_of(lengths)
    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    rows = rows_of(batch)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert rows_of(padded) == (rows * (divisor + 1))[: len(rows) + pad_size]
    assert rows_of(unpad_dataproto(padded, pad_size)) == rows


@given(LENGTHS, st.data())
@settings(max_examples=50)
def test_parts_make_the_whole_again(lengths: list[int], data: st.DataObject):
    batch = batch_of(lengths)
    size = data.draw(st.integers(1, len(lengths)))
    assert rows_of(DataProto.concat(batch.split(size))) == rows_of(batch)
    order = data.draw(st.permutations(range(len(lengths))))
    reordered = batch.select_idxs(range(len(batch)))
    reordered.reorder(order)
    assert rows_of(reordered) == [rows_of(batch)[row] for row in order]


# Padded tensors, TensorDict, a run's own batches


def test_padded_tensors():
    ids = torch.tensor([[0, 0, 5, 6, 7, 0], [0, 8, 9, 3, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0]])
    batch = DataProto.from_padded(
        {"input_ids": ids, "logprobs": ids * 0.5, "score": torch.ones(2)}, mask, {"uid": ["a", "b"]}
    )
    assert [batch.batch["input_ids"][row].tolist() for row in (0, 1)] == [[5, 6, 7], [8, 9, 3]]
    assert batch.batch["logprobs"][1].tolist() == [4.0, 4.5, 1.5] and batch.batch["score"].tolist() == [1.0, 1.0]
    right = batch.to_padded(width=4, pad_values={"input_ids": -1})
    assert right.batch["input_ids"].tolist() == [[5, 6, 7, -1], [8, 9, 3, -1]]
    assert right.batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    left = batch_of([2, 1]).to_padded(side="left")
    assert left.batch["input_ids"].tolist() == [[0, 1], [0, 10]] and left.batch["attention_mask"].tolist() == [
        [1, 1],
        [0, 1],
    ]
    with pytest.raises(ValueError, match="row 0 has 3 tokens, more than a width of 2"):
        batch.to_padded(width=2)


@given(LENGTHS, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_what_is_padded_is_unpadded_again(lengths: list[int], side: Any, more: int):
    batch = batch_of(lengths)
    padded = batch.to_padded(width=max(lengths) + more, side=side)
    assert padded.batch["input_ids"].shape == (len(lengths), max(lengths) + more)
    mask = padded.batch["attention_mask"]
    tensors = {name: column for name, column in padded.batch.items() if name != "attention_mask"}
    again = DataProto.from_padded(tensors, mask, padded.non_tensor_batch)
    if max(lengths) + more:
        assert rows_of(again) == rows_of(batch)


def test_tensordict():
    batch = batch_of([2, 1, 3])
    tensordict = batch.to_tensordict()
    assert tensordict.batch_size == torch.Size([3]) and tensordict["input_ids"].offsets().tolist() == [0, 2, 3, 6]
    assert tensordict["uid"] == ["u0", "u1", "u2"] and tensordict["step"] == 3
    again = DataProto.from_tensordict(tensordict, {"more": 1})
    assert rows_of(again) == ABC and again.meta_info == {"step": 3, "more": 1}
    # What is said beside the TensorDict counts.
    assert DataProto.from_tensordict(tensordict, {"step": 4}).meta_info == {"step": 4}
    with pytest.raises(ValueError, match=r"\['uid'\] of meta_info are columns, too"):
        DataProto.from_dict({"a": torch.ones(1)}, {"uid": ["x"]}, {"uid": 1}).to_tensordict()
    assert rows_of(DataProto.from_tensordict(tensordict[1:])) == ABC[1:] and len(DataProto.from_tensordict()) == 0


def test_a_tensordict_is_taken_where_verl_takes_one():
    from tensordict import TensorDict

    columns = TensorDict({"obs": torch.arange(6).view(3, 2), "act": torch.ones(3)}, batch_size=[3])
    labels = np.array(["a", "b", "c"], dtype=object)
    for batch in (
        DataProto(columns, {"label": labels}, {"step": 1}),  # pyright: ignore[reportArgumentType]
        DataProto.from_dict(columns, {"label": labels}, {"step": 1}),  # pyright: ignore[reportArgumentType]
    ):
        assert len(batch) == 3 and batch.batch.batch_size == torch.Size([3]) and batch.meta_info == {"step": 1}
        assert batch[1:].batch["obs"].tolist() == [[2, 3], [4, 5]] and list(batch.batch) == ["obs", "act"]
        assert batch[2].non_tensor_batch["label"] == "c"
    assert rows_of(DataProto(batch_of([2, 1, 3]).to_tensordict())) == ABC
    for wrong in (TensorDict({"a": torch.ones(3, 2)}, batch_size=[3, 2]), TensorDict({}, batch_size=[])):
        with pytest.raises(ValueError, match="a batch has one dimension of rows"):
            DataProto(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'obs': 3, 'act': 3, 'label': 2\}"):
        DataProto(columns, {"label": labels[:2]})  # pyright: ignore[reportArgumentType]


def test_batches_of_a_run():
    run = protocol.DataProto(
        {"input_ids": Jagged.from_list([[1, 2], [3]], torch.int64)}, {"uid": np.array(["a", "b"])}, {"step": 1}
    )
    batch = DataProto.from_run(run)
    assert batch.batch["input_ids"][0].tolist() == [1, 2] and batch.meta_info == {"step": 1}
    batch.batch["score"] = torch.tensor([0.5, 1.0])
    back = batch.to_run()
    assert back.samples["score"].tolist() == [0.5, 1.0] and back.tokens["input_ids"][1].tolist() == [3]
    batch.batch["mask"] = torch.ones(2, 3)
    with pytest.raises(ValueError, match="'mask' has shape"):
        batch.to_run()


# Files


def test_saved_and_loaded(tmp_path: Path):
    batch = batch_of([2, 0, 3])
    batch.batch["half"] = torch.ones(3, 2, dtype=torch.bfloat16)
    batch.non_tensor_batch["count"] = np.array([1, 2, 3], dtype=np.int32)
    batch.non_tensor_batch["name"] = np.array(["a", "bc", ""])
    batch.meta_info |= {"temperature": np.float64(0.5), "eos": [1, (2, 3)], "nothing": None, "ids": torch.arange(2)}
    batch.save_to_disk(tmp_path / "batch.pt")
    loaded = DataProto.load_from_disk(tmp_path / "batch.pt")
    assert rows_of(loaded) == rows_of(batch) and loaded.batch["half"].dtype == torch.bfloat16
    assert loaded.non_tensor_batch["count"].dtype == np.int32 and loaded.non_tensor_batch["name"].tolist() == [
        "a",
        "bc",
        "",
    ]
    assert loaded.meta_info["eos"] == [1, (2, 3)] and loaded.meta_info["temperature"] == 0.5
    assert loaded.meta_info["ids"].tolist() == [0, 1] and [path.name for path in tmp_path.iterdir()] == ["batch.pt"]


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_run(tmp_path: Path):
    mark = tmp_path / "mark"
    for name, write in (
        ("pickle", lambda path: path.write_bytes(pickle.dumps(Touches(mark)))),
        ("torch", lambda path: torch.save(Touches(mark), path)),
    ):
        write(tmp_path / name)
        with pytest.raises(ValueError, match="not a file of tensors, arrays and plain values"):
            DataProto.load_from_disk(tmp_path / name)
    assert not mark.exists()
    torch.save({"batch": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no DataProto"):
        DataProto.load_from_disk(tmp_path / "other")


def test_what_cannot_be_saved_is_named(tmp_path: Path):
    batch = batch_of([1])
    batch.meta_info["made"] = object()
    with pytest.raises(ValueError, match=r"\['meta_info'\]\['made'\] is a object: only tensors"):
        batch.save_to_disk(tmp_path / "batch.pt")
    assert list(tmp_path.iterdir()) == []


# What does not fit


def test_columns_of_different_numbers_of_rows():
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'a': 2, 'b': 3\}"):
        DataProto.from_dict({"a": torch.ones(2)}, {"b": [1, 2, 3]})
    with pytest.raises(ValueError, match="is a list; give an array"):
        DataProto(non_tensor_batch={"a": [1]})  # pyright: ignore[reportArgumentType]


def test_single_dict_sorts_columns():
    batch = DataProto.from_single_dict(
        {"a": torch.ones(2), "b": ["x", [1, 2]], "c": Jagged.from_list([[1], []], torch.int64)}
    )
    assert set(batch.batch) == {"a", "c"} and batch.non_tensor_batch["b"].tolist() == ["x", [1, 2]]


def test_what_is_none_is_empty():
    for labels, rows in ((np.array(["a", "b", "c"], dtype=object), 3), (None, 0)):
        arrays = None if labels is None else {"label": labels}
        batch = DataProto(batch=None, non_tensor_batch=arrays, meta_info={"step": 1})  # pyright: ignore[reportArgumentType]
        assert len(batch) == rows and batch.meta_info == {"step": 1}
        assert len(DataProto.concat([batch, batch])) == 2 * rows
    empty = DataProto(None, None, None)  # pyright: ignore[reportArgumentType]
    assert empty.meta_info == {} and len(empty) == 0 and empty.batch.batch_size == torch.Size([])
    with pytest.raises(ValueError, match="without rows"):
        pad_dataproto_to_divisor(empty, 2)
