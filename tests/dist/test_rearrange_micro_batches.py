"""rearrange_micro_batches over a data-parallel group: equal counts, and an error that every rank sees."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scalerl.extras.verl.compat import rearrange_micro_batches
from tests.dist.launch import run_ranks

LENGTHS = [[6, 6, 6, 6], [2, 2], [3]]


def _counts(lengths: list[list[int]], cap: int, same: bool, divided_by: int | None) -> list[int] | str:
    """Tokens of each micro-batch of this rank, or the error."""
    dist.init_process_group("gloo")
    mask = (torch.arange(9) < torch.tensor(lengths[dist.get_rank()])[:, None]).long()
    try:
        micros, _ = rearrange_micro_batches(
            {"attention_mask": mask},
            cap,
            dp_group=dist.group.WORLD,
            same_micro_num_in_dp=same,
            num_batches_divided_by=divided_by,
        )
        return [int(micro["attention_mask"].sum()) for micro in micros]
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def test_all_ranks_get_the_largest_count():
    assert run_ranks(3, _counts, LENGTHS, 8, True, None) == [[6, 6, 6, 6], [2, 2, 0, 0], [3, 0, 0, 0]]


def test_the_count_is_a_multiple_on_all_ranks():
    assert [len(rank) for rank in run_ranks(3, _counts, LENGTHS, 8, True, 3)] == [6, 6, 6]


def test_each_rank_alone():
    assert run_ranks(3, _counts, LENGTHS, 8, False, None) == [[6, 6, 6, 6], [4], [3]]


def test_a_row_over_the_cap_ends_all_ranks():
    first, second = run_ranks(2, _counts, [[2, 2], [3, 9]], 8, True, None)
    assert second == "row 1 has 9 tokens, over max_token_len=8: raise it to at least 9"
    assert first == "another data-parallel rank has a row over max_token_len=8: see its error"
