"""Every helper that this field knows by name has the arguments that it always had."""

from __future__ import annotations

import importlib
import inspect

import pytest

NONE = object()
# name -> its arguments in order, with their defaults (NONE: there is none). More may follow.
ARGUMENTS = {
    "append_to_dict": {"data": NONE, "new_data": NONE, "prefix": ""},
    "copy_to_local": {
        "src": NONE,
        "cache_dir": None,
        "filelock": ".file.lock",
        "verbose": False,
        "always_recopy": False,
        "use_shm": False,
    },
    "reduce_metrics": {"metrics": NONE},
    "find_latest_ckpt_path": {"path": NONE, "directory_format": "global_step_{}"},
    "RLHFDataset": {"data_files": NONE, "tokenizer": NONE, "config": NONE, "processor": None, "max_samples": -1},
    "Tracking": {"project_name": NONE, "experiment_name": NONE, "default_backend": "console", "config": None},
    "collate_fn": {"data_list": NONE},
    "get_constant_schedule_with_warmup": {"optimizer": NONE, "num_warmup_steps": NONE, "last_epoch": -1},
    "logprobs_from_logits": {"logits": NONE, "labels": NONE, "inplace_backward": True},
    "masked_mean": {"values": NONE, "mask": NONE, "axis": None},
    "masked_whiten": {"values": NONE, "mask": NONE, "shift_mean": True},
    "get_reverse_idx": {"idx_map": NONE},
    "rearrange_micro_batches": {
        "batch": NONE,
        "max_token_len": NONE,
        "dp_group": None,
        "num_batches_divided_by": None,
        "same_micro_num_in_dp": True,
        "min_num_micro_batch": None,
        "use_dynamic_bsz_balance": True,
    },
    "gather_outputs_and_unpad": {
        "x": NONE,
        "gather_dim": NONE,
        "unpad_dim": None,
        "padding_size": 0,
        "grad_scaler": True,
        "group": None,
    },
    "ulysses_pad_and_slice_inputs": {"input_ids_rmpad": NONE, "position_ids_rmpad": None, "sp_size": 1},
    "GPUMemoryLogger": {"role": NONE, "logger": None, "level": 10, "log_only_rank_0": True},
    "log_gpu_memory_usage": {"head": NONE, "logger": None, "level": 10, "rank": 0},
}


MODULES = {
    "copy_to_local": "scalerl.data",
    "RLHFDataset": "scalerl.data",
    "Tracking": "scalerl.tracking",
    "GPUMemoryLogger": "scalerl.tracking.metrics",
    "log_gpu_memory_usage": "scalerl.tracking.metrics",
    "find_latest_ckpt_path": "scalerl.checkpoint.store",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_name_has_the_arguments_that_it_always_had(name):
    function = getattr(importlib.import_module(MODULES.get(name, "scalerl.extras.verl.compat")), name)
    parameters = list(inspect.signature(function).parameters.values())[: len(ARGUMENTS[name])]
    empty = inspect.Parameter.empty
    defaults = {each.name: NONE if each.default is empty else each.default for each in parameters}
    assert defaults == ARGUMENTS[name]
    assert list(defaults) == list(ARGUMENTS[name])
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters)
