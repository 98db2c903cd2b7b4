"""The methods of verl's DataProto have verl's arguments and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from scalerl.batch.data_proto import Jagged
from scalerl.extras.verl.compat import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

NONE = object()
# verl/protocol.py: arguments in order with their defaults (NONE: there is none); self and cls left out.
METHODS: dict[str, dict[str, Any]] = {
    "check_consistency": {},
    "from_dict": {
        "tensors": None,
        "non_tensors": None,
        "meta_info": None,
        "num_batch_dims": 1,
        "auto_padding": False,
    },
    "from_single_dict": {"data": NONE, "meta_info": None, "auto_padding": False},
    "from_tensordict": {"tensor_dict": None, "meta_info": None, "num_batch_dims": 1},
    "to_tensordict": {},
    "save_to_disk": {"filepath": NONE},
    "load_from_disk": {"filepath": NONE},
    "print_size": {"prefix": ""},
    "get_data_info": {},
    "to": {"device": NONE},
    "select": {"batch_keys": None, "non_tensor_batch_keys": None, "meta_info_keys": None, "deepcopy": False},
    "select_idxs": {"idxs": NONE},
    "slice": {"start": None, "end": None, "step": None},
    "pop": {"batch_keys": None, "non_tensor_batch_keys": None, "meta_info_keys": None},
    "rename": {"old_keys": None, "new_keys": None},
    "union": {"other": NONE},
    "make_iterator": {"mini_batch_size": NONE, "epochs": NONE, "seed": None, "dataloader_kwargs": None},
    "padding": {"padding_size": NONE, "padding_candidate": ""},
    "chunk": {"chunks": NONE},
    "split": {"split_size": NONE},
    "concat": {"data": NONE},
    "reorder": {"indices": NONE},
    "repeat": {"repeat_times": 2, "interleave": True},
    "sample_level_repeat": {"repeat_times": NONE},
}
FUTURE: dict[str, dict[str, Any]] = {"concat": {"data": NONE}, "chunk": {"chunks": NONE}, "get": {}}
FUNCTIONS = {
    pad_dataproto_to_divisor: {"data": NONE, "size_divisor": NONE},
    unpad_dataproto: {"data": NONE, "pad_size": NONE},
}
# Fields of the dataclasses, in order.
FIELDS = {
    DataProto: ["batch", "non_tensor_batch", "meta_info"],
    DataProtoItem: ["batch", "non_tensor_batch", "meta_info"],
    DataProtoFuture: ["collect_fn", "futures", "dispatch_fn"],
}


def arguments(function: Any) -> dict[str, Any]:
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
    return {each.name: NONE if each.default is inspect.Parameter.empty else each.default for each in parameters}


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [
        *((DataProto, name, expected) for name, expected in METHODS.items()),
        *((DataProtoFuture, name, expected) for name, expected in FUTURE.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_method_has_verls_arguments(owner: type, name: str, expected: dict[str, Any]) -> None:
    own_arguments = arguments(getattr(owner, name))
    assert own_arguments == expected and list(own_arguments) == list(expected)
    static = {DataProto: {"load_from_disk", "concat"}, DataProtoFuture: {"concat"}}[owner]
    assert isinstance(inspect.getattr_static(owner, name), staticmethod) == (name in static)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_has_verls_arguments(function: Any) -> None:
    own_arguments = arguments(function)
    assert own_arguments == FUNCTIONS[function] and list(own_arguments) == list(FUNCTIONS[function])


def test_fields_are_verls() -> None:
    for cls, names in FIELDS.items():
        assert [field.name for field in dataclasses.fields(cls)] == names


def test_arguments_that_mean_nothing_here_are_refused() -> None:
    for make in (DataProto.from_dict, lambda **more: DataProto.from_single_dict({}, **more)):
        with pytest.raises(ValueError, match=r"auto_padding = True: .* pad_dataproto_to_divisor"):
            make(auto_padding=True)
    for make in (DataProto.from_dict, DataProto.from_tensordict):
        with pytest.raises(ValueError, match="num_batch_dims = 2"):
            make(num_batch_dims=2)
    assert len(DataProto.from_tensordict()) == 0


@pytest.mark.parametrize(("candidate", "added"), [("", "c"), ("last", "c"), ("first", "a")])
def test_rows_are_added_at_the_end(candidate: str, added: str) -> None:
    batch = DataProto.from_dict({"ids": Jagged.from_list([[1], [2, 3], []], torch.int64)}, {"uid": ["a", "b", "c"]})
    batch.padding(2, candidate)
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "b", "c", added, added]
    assert batch.batch["ids"][4].tolist() == {"a": [1], "c": []}[added]
    batch.padding(0)
    assert len(batch) == 5
    with pytest.raises(ValueError, match="without rows"):
        DataProto().padding(1)


def test_a_batch_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    column = Jagged.from_list([[1], [2, 3]], torch.int64)
    batch = DataProto.from_dict({"ids": column, "score": torch.zeros(2, 4)}, {"uid": ["a", "b"]}, {"step": 3})
    assert batch.get_data_info().splitlines() == [
        "batch",
        "  ids: 2 rows of (3,) (torch.int64) cpu",
        "  score: (2, 4) (torch.float32) cpu",
        "non_tensor_batch",
        "  uid: (2,) (object)",
        "meta_info",
        "  step: int",
    ]
    batch.print_size("after rollout")
    DataProto.from_dict({"half": torch.zeros(2**19, dtype=torch.int64)}).print_size()
    # 3 x 8 + 8 x 4 bytes of tensors, two references; 4 MiB.
    assert capsys.readouterr().out.splitlines() == [
        "after rollout, batch: 5.22e-08 GiB, non_tensor_batch: 1.49e-08 GiB",
        "batch: 0.00391 GiB, non_tensor_batch: 0 GiB",
    ]
