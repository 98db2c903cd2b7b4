"""Every helper that this field knows by name is where docs/extending.md says, with the arguments it always had."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import scalerl.extras.verl.compat

PAGE = Path(__file__).parents[5] / "docs" / "extending.md"
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


def table() -> dict[str, str]:
    """Name -> module, of the page's table."""
    module_of = {}
    for line in PAGE.read_text(encoding="utf-8").split("## Code that was written with verl's helpers")[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and cells[2].startswith("`scalerl"):
            assert cells[3], f"{cells[1]}: the page does not say what the loop uses instead"
            module_of |= dict.fromkeys(re.findall(r"`(\w+)`", cells[1]), cells[2].strip("`"))
    return module_of


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_name_is_where_the_page_says_with_its_arguments(name):
    function = getattr(importlib.import_module(table()[name]), name)
    parameters = list(inspect.signature(function).parameters.values())[: len(ARGUMENTS[name])]
    empty = inspect.Parameter.empty
    defaults = {each.name: NONE if each.default is empty else each.default for each in parameters}
    assert defaults == ARGUMENTS[name]
    assert list(defaults) == list(ARGUMENTS[name])
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in parameters)


def test_the_page_lists_all_of_compat():
    listed = {name for name, module in table().items() if module.startswith("scalerl.extras.verl.compat")}
    assert listed == set(scalerl.extras.verl.compat.__all__)
    assert set(ARGUMENTS) <= set(table())
