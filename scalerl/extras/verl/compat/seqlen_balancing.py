"""Splits one rank's padded batch into micro-batches of at most so many tokens, as verl does.

A run of scalerl is packed by `batch.plan_step`, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scalerl.batch.bin_packing import Bins, fewest_bins, least_loaded, pack_bins, split_to
from scalerl.extras.verl.compat.jagged_columns import is_tensordict


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """Splits a batch into micro-batches of at most max_token_len tokens each (a hard cap).

    batch: a TensorDict [B], a mapping of [B, ...] tensors, or an object indexed as either, with `attention_mask`
    [B, S]; a row's tokens are the sum of its mask.
    dp_group: with same_micro_num_in_dp, all ranks of the group get the largest count of any (collective call).
    num_batches_divided_by: the count is a multiple of it (virtual pipeline size).  min_num_micro_batch: lowest count.
    use_dynamic_bsz_balance: balance tokens between micro-batches; False: keep the first packing.
    If the count exceeds B, the last micro-batches have 0 rows.
    Returns (micro-batches, row indices of each). The micro-batches of a TensorDict are TensorDicts, those of another
    mapping dicts; `get_reverse_idx` of all indices restores the order.
    Raises ValueError naming the row for one over max_token_len; then the other ranks of dp_group raise too.
    """
    mask = batch["attention_mask"]
    num_tokens = mask.sum(dim=1).cpu().numpy().astype(np.int64)
    error = _over_the_cap(num_tokens, max_token_len)
    bins: Bins = [] if error else _fewest_bins(num_tokens, max_token_len)
    count = max(len(bins), min_num_micro_batch or 1, 1)
    if dp_group is not None and same_micro_num_in_dp:
        count, failed = _max_over(dp_group, count, error is not None, mask.device)
        if failed and not error:
            error = f"another data-parallel rank has a row over max_token_len={max_token_len}: see its error"
    if error:
        raise ValueError(error)
    multiple = num_batches_divided_by or 1
    count = -(-count // multiple) * multiple
    bins = _spread(bins, num_tokens, count, max_token_len, use_dynamic_bsz_balance)
    return [_select_rows(batch, rows) for rows in bins], bins


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse permutation: output[idx_map[i]] = i.  ValueError unless idx_map is a permutation of 0..len-1."""
    inverse = [-1] * len(idx_map)
    for position, index in enumerate(idx_map):
        if not 0 <= index < len(inverse) or inverse[index] != -1:
            raise ValueError(f"idx_map[{position}] = {index}: not a permutation of 0..{len(inverse) - 1}")
        inverse[index] = position
    return inverse


def _fewest_bins(num_tokens: np.ndarray, cap: int) -> Bins:
    if not len(num_tokens):
        return []
    balanced, bins, _ = fewest_bins(num_tokens, cap, 1, lambda count: least_loaded(num_tokens, num_tokens, count, cap))
    return bins if balanced is None else balanced


def _spread(bins: Bins, num_tokens: np.ndarray, count: int, cap: int, balance: bool) -> Bins:
    """Spreads the rows over `count` bins, balanced if asked for and possible; a bin is empty only if rows run out."""
    filled = min(count, len(num_tokens))
    balanced = pack_bins(num_tokens, num_tokens, filled, cap) if balance else None
    bins = split_to(bins, num_tokens, filled) if balanced is None else balanced
    return [sorted(rows) for rows in bins] + [[] for _ in range(count - filled)]


def _max_over(group: dist.ProcessGroup, count: int, failed: bool, device: torch.device) -> tuple[int, bool]:
    values = torch.tensor([count, int(failed)], dtype=torch.int64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values[0]), bool(values[1])


def _over_the_cap(num_tokens: np.ndarray, cap: int) -> str | None:
    if not len(num_tokens) or num_tokens.max() <= cap:
        return None
    row = int((num_tokens > cap).argmax())
    return f"row {row} has {num_tokens[row]} tokens, over max_token_len={cap}: raise it to at least {num_tokens.max()}"


def _select_rows(batch: Any, rows: list[int]) -> Any:
    indices = torch.tensor(rows, dtype=torch.int64)
    if isinstance(batch, Mapping) and not is_tensordict(batch):
        return {name: column[indices] for name, column in batch.items()}
    return batch[indices]
