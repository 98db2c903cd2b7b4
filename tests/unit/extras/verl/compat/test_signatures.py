"""The names that this field knows have the arguments and defaults that they always had."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch

from scalerl.batch.data_proto import Jagged
from scalerl.extras.verl.compat import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
)

# Methods of verl/protocol.py, with their arguments in order and their defaults.
DATA_PROTO = """
check_consistency()
from_dict(tensors=None, non_tensors=None, meta_info=None, num_batch_dims=1, auto_padding=False)
from_single_dict(data, meta_info=None, auto_padding=False)
from_tensordict(tensor_dict=None, meta_info=None, num_batch_dims=1)
to_tensordict()
save_to_disk(filepath)
load_from_disk(filepath)
print_size(prefix='')
get_data_info()
to(device)
select(batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None, deepcopy=False)
select_idxs(idxs)
slice(start=None, end=None, step=None)
pop(batch_keys=None, non_tensor_batch_keys=None, meta_info_keys=None)
rename(old_keys=None, new_keys=None)
union(other)
make_iterator(mini_batch_size, epochs, seed=None, dataloader_kwargs=None)
padding(padding_size, padding_candidate='')
chunk(chunks)
split(split_size)
concat(data)
reorder(indices)
repeat(repeat_times=2, interleave=True)
sample_level_repeat(repeat_times)
"""
FUTURE = """
concat(data)
chunk(chunks)
get()
"""
STATIC = {"DataProto.concat", "DataProto.load_from_disk", "DataProtoFuture.concat"}
# Functions and classes that this field knows by name. More arguments may follow.
KNOWN = {
    "scalerl.extras.verl.compat": """
pad_dataproto_to_divisor(data, size_divisor)
unpad_dataproto(data, pad_size)
append_to_dict(data, new_data, prefix='')
reduce_metrics(metrics)
collate_fn(data_list)
get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch=-1)
logprobs_from_logits(logits, labels, inplace_backward=True)
masked_mean(values, mask, axis=None)
masked_whiten(values, mask, shift_mean=True)
get_reverse_idx(idx_map)
rearrange_micro_batches(batch, max_token_len, dp_group=None, num_batches_divided_by=None, same_micro_num_in_dp=True, \
min_num_micro_batch=None, use_dynamic_bsz_balance=True)
gather_outputs_and_unpad(x, gather_dim, unpad_dim=None, padding_size=0, grad_scaler=True, group=None)
ulysses_pad_and_slice_inputs(input_ids_rmpad, position_ids_rmpad=None, sp_size=1)
""",
    "scalerl.data": """
copy_to_local(src, cache_dir=None, filelock='.file.lock', verbose=False, always_recopy=False, use_shm=False)
RLHFDataset(data_files, tokenizer, config, processor=None, max_samples=-1)
""",
    "scalerl.tracking": """
Tracking(project_name, experiment_name, default_backend='console', config=None)
""",
    "scalerl.tracking.metrics": """
GPUMemoryLogger(role, logger=None, level=10, log_only_rank_0=True)
log_gpu_memory_usage(head, logger=None, level=10, rank=0)
""",
    "scalerl.checkpoint.store": """
find_latest_ckpt_path(path, directory_format='global_step_{}')
""",
}
# Fields of the dataclasses, in order.
FIELDS = {
    DataProto: ["batch", "non_tensor_batch", "meta_info"],
    DataProtoItem: ["batch", "non_tensor_batch", "meta_info"],
    DataProtoFuture: ["collect_fn", "futures", "dispatch_fn"],
}


def arguments(function: Any) -> list[str]:
    """As `name` or `name=default`, without self; each may be given by position and by name."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return [
        each.name if each.default is inspect.Parameter.empty else f"{each.name}={each.default!r}"
        for each in parameters
        if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize(("owner", "lines"), [(DataProto, DATA_PROTO), (DataProtoFuture, FUTURE)])
def test_methods_have_verls_arguments(owner: type, lines: str) -> None:
    for line in lines.split("\n")[1:-1]:
        name = line.partition("(")[0]
        assert f"{name}({', '.join(arguments(getattr(owner, name)))})" == line
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        assert is_static == (f"{owner.__name__}.{name}" in STATIC), line


@pytest.mark.parametrize(("module", "lines"), KNOWN.items())
def test_a_name_has_the_arguments_that_it_always_had(module: str, lines: str) -> None:
    for line in lines.split("\n")[1:-1]:
        name, _, known = line.removesuffix(")").partition("(")
        given = arguments(getattr(importlib.import_module(module), name))
        assert ", ".join(given[: known.count(",") + 1]) == known, line


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
