"""The laws of a step's plan, over random batches, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scalerl.batch import Alignment, SizeKeys, StepPlan, packing_metrics, plan_step, seqlen_metrics

CAP = 64


@st.composite
def problems(draw):
    """(num_tokens, dp_size, mini-batches, micro_batch_multiple, workload or None)."""
    dp_size, multiple = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2]))
    step = dp_size * multiple
    sizes = draw(st.lists(st.integers(1, 5).map(lambda k: k * step), min_size=1, max_size=3))
    num_rows = sum(sizes)
    kind = draw(st.sampled_from(["any", "short", "half", "long"]))
    low, high = {"any": (1, CAP), "short": (1, 9), "half": (25, 40), "long": (33, CAP)}[kind]
    num_tokens = draw(st.lists(st.integers(low, high), min_size=num_rows, max_size=num_rows))
    order = draw(st.permutations(range(num_rows)))
    cuts = np.cumsum(sizes)[:-1]
    minis = [part.tolist() for part in np.split(np.array(order), cuts)]
    workload = draw(st.sampled_from([None, [float(t * t + 5 * t) for t in num_tokens]]))
    return num_tokens, dp_size, minis, multiple, workload


def make(problem) -> StepPlan:
    num_tokens, dp_size, minis, multiple, workload = problem
    return plan_step(
        num_tokens,
        dp_size=dp_size,
        mini_batches=minis,
        max_tokens_per_micro_batch=CAP,
        workload_S=workload,
        micro_batch_multiple=multiple,
    )


def first_fit(num_tokens: list[int]) -> int:
    rooms: list[int] = []
    for size in sorted(num_tokens, reverse=True):
        index = next((i for i, room in enumerate(rooms) if room >= size), None)
        if index is None:
            rooms.append(CAP - size)
        else:
            rooms[index] -= size
    return len(rooms)


@given(problems())
def test_laws(problem):
    num_tokens, dp_size, minis, multiple, _ = problem
    plan = make(problem)
    assert (plan.dp_size, plan.num_mini_batches) == (dp_size, len(minis))
    for number, mini in enumerate(minis):
        per_rank = [rank[number] for rank in plan.micro_batches]
        # Every row of the mini-batch, once, and no other.
        assert sorted(row for rank in per_rank for micro in rank for row in micro) == sorted(mini)
        # Equal counts, in whole virtual-pipeline groups, none empty, none over the cap.
        assert {len(rank) for rank in per_rank} == {plan.num_micro_batches[number]}
        assert plan.num_micro_batches[number] % multiple == 0
        assert all(0 < sum(num_tokens[row] for row in micro) <= CAP for rank in per_rank for micro in rank)
        # As few as first-fit-decreasing, rounded up.
        step = dp_size * multiple
        assert (
            plan.num_micro_batches[number] * dp_size <= -(-first_fit([num_tokens[row] for row in mini]) // step) * step
        )


@given(problems())
def test_equal_input_gives_an_equal_plan(problem):
    num_tokens, dp_size, minis, multiple, workload = problem
    as_arrays = (np.array(num_tokens), dp_size, [np.array(m) for m in minis], multiple, workload and np.array(workload))
    plan = make(problem)
    assert plan == make(problem) == make(as_arrays)
    assert hash(plan) == hash(make(problem))
    assert all(type(row) is int for rank in range(dp_size) for row in plan.rows(rank))


@given(problems())
def test_unit_of_the_workload_does_not_matter(problem):
    num_tokens, dp_size, minis, multiple, _ = problem
    doubled = (num_tokens, dp_size, minis, multiple, [2.0 * t for t in num_tokens])
    assert make(doubled) == make((num_tokens, dp_size, minis, multiple, None))


@given(problems())
def test_local_micro_batches_index_the_ranks_own_rows(problem):
    plan = make(problem)
    for rank in range(plan.dp_size):
        rows = plan.rows(rank)
        local = plan.local_micro_batches(rank)
        back = tuple(tuple(tuple(rows[i] for i in micro) for micro in mini) for mini in local)
        assert back == plan.micro_batches[rank]
        assert [i for mini in local for micro in mini for i in micro] == list(range(len(rows)))


def loads(plan: StepPlan, workload: np.ndarray) -> np.ndarray:
    return np.array([workload[list(plan.rows(rank))].sum() for rank in range(plan.dp_size)])


@pytest.mark.parametrize(("mu", "sigma", "longest", "cap"), [(7.0, 1.0, 8192, 16384), (8.5, 1.2, 32768, 32768)])
@pytest.mark.parametrize("quadratic", [False, True])
def test_ranks_are_within_two_percent_on_log_normal_lengths(mu, sigma, longest, cap, quadratic):
    # Seeds among which bins are so full that only swaps of two samples for one even the ranks out.
    for seed in [*range(12), 23, 50, 58, 82, 85, 174]:
        tokens = np.clip(np.random.default_rng(seed).lognormal(mu, sigma, 128), 1, longest).astype(np.int64)
        workload = 24576.0 * tokens + tokens.astype(float) ** 2 if quadratic else tokens.astype(float)
        plan = plan_step(
            tokens, dp_size=8, mini_batches=[range(128)], max_tokens_per_micro_batch=cap, workload_S=workload
        )
        ranks = loads(plan, workload)
        assert ranks.max() / ranks.mean() <= 1.02


def test_exchanges_reach_the_balance_that_longest_first_misses():
    # Longest first gives 3 + 2 + 2 and 3 + 2; a swap of 3 with 2 gives 6 and 6.
    tokens = [3, 3, 2, 2, 2]
    plan = plan_step(tokens, dp_size=2, mini_batches=[range(5)], max_tokens_per_micro_batch=7)
    assert loads(plan, np.array(tokens)).tolist() == [6, 6]


def test_no_more_micro_batches_than_needed():
    # Eight of 7 tokens under 16: pairs; a plan by total tokens (56 / 16 -> 4) holds, one by rows would take 8.
    plan = plan_step([7] * 8, dp_size=2, mini_batches=[range(8)], max_tokens_per_micro_batch=16)
    assert plan.num_micro_batches == (2,)
    # Under 8 every row is alone, though 56 / 8 = 7 micro-batches would hold the tokens.
    plan = plan_step([7] * 8, dp_size=2, mini_batches=[range(8)], max_tokens_per_micro_batch=8)
    assert plan.num_micro_batches == (4,)


def test_first_fit_is_used_where_balancing_gets_stuck():
    plan = plan_step([13, 9, 7, 6, 5], dp_size=2, mini_batches=[range(5)], max_tokens_per_micro_batch=20)
    assert {rank[0][0] for rank in plan.micro_batches} == {(0, 2), (1, 3, 4)}


def test_one_giant_and_many_small():
    plan = plan_step([60, *[1] * 7], dp_size=2, mini_batches=[range(8)], max_tokens_per_micro_batch=60)
    assert plan.micro_batches == (((((0,),),)), ((tuple(range(1, 8)),),))


def test_light_micro_batches_are_first_and_last():
    plan = plan_step([8, 1, 7, 2, 6], dp_size=1, mini_batches=[range(5)], max_tokens_per_micro_batch=8)
    work = [sum([8, 1, 7, 2, 6][row] for row in micro) for micro in plan.micro_batches[0][0]]
    peak = work.index(max(work))
    assert work == sorted(work[: peak + 1]) + sorted(work[peak + 1 :], reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens_S": [4, 65, 4, 4]}, r"sample 1 \(prompt 7, sample 1\) has 65 tokens, over the 64.*at least 65"),
        ({"num_tokens_S": [4, 4, 0, 4]}, r"sample 2 \(prompt 8, sample 0\) has 0 tokens"),
        ({"workload_S": [1, 1, 1, float("nan")]}, r"sample 3 .*has workload nan"),
        ({"workload_S": [1, 1, 1, 0]}, r"sample 3 .*has workload 0"),
        ({"workload_S": [1, 1]}, r"2 workloads for 4 samples"),
        ({"mini_batches": [[0, 1], [2]]}, r"mini_batches must hold every row once: sample 3 .*occurs 0 times"),
        ({"mini_batches": [[0, 1], [1, 2, 3]]}, r"sample 1 .*occurs 2 times"),
        ({"mini_batches": [[0, 1], [2, 4]]}, r"rows 0..4, the batch has rows 0..3"),
        ({"mini_batches": [[0, 1, 2], [3]]}, r"mini-batch 1 has 1 samples, too few.*2 data-parallel.*at least 2"),
        ({"micro_batch_multiple": 2}, r"mini-batch 0 has 2 samples, too few.*2 micro-batches.*at least 4"),
        ({"mini_batches": []}, r"number of mini_batches is 0"),
        ({"dp_size": 0}, r"dp_size is 0"),
    ],
)
def test_refuses(changes, message):
    arguments = {
        "num_tokens_S": [4, 4, 4, 4],
        "dp_size": 2,
        "mini_batches": [[0, 1], [2, 3]],
        "max_tokens_per_micro_batch": CAP,
        "name_of": lambda row: f"prompt {7 + row // 2}, sample {row % 2}",
    }
    with pytest.raises(ValueError, match=message):
        plan_step(**arguments | changes)


def test_refuses_what_equal_counts_cannot_hold():
    # Five rows that each need a micro-batch of their own, on two ranks: 3 + 2, or one empty.
    with pytest.raises(
        ValueError, match=r"mini-batch 0 of 5 samples needs 6 micro-batches of 64 tokens.*multiple of 2"
    ):
        plan_step([60] * 5, dp_size=2, mini_batches=[range(5)], max_tokens_per_micro_batch=CAP)


@pytest.mark.parametrize(
    ("num_tokens", "dp_size", "message"),
    [
        ([4, CAP + 1], 1, f"set a.max_tokens to at least {CAP + 1}, or"),
        ([4], 2, "make a.batch x n at least 2, or"),
        ([60] * 5, 2, "raise a.max_tokens, or make a.batch x n a multiple of 2"),
    ],
)
def test_errors_name_the_keys_of_the_role(num_tokens, dp_size, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan_step(
            num_tokens,
            dp_size=dp_size,
            mini_batches=[range(len(num_tokens))],
            max_tokens_per_micro_batch=CAP,
            keys=SizeKeys("a.max_tokens", "a.batch x n"),
        )
    assert "actor" not in str(caught.value)


@given(problems())
def test_seqlen_metrics(problem):
    num_tokens, dp_size, _, _, _ = problem
    plan = make(problem)
    got = seqlen_metrics(num_tokens, plan)
    # numpy.array_split: the first len % dp_size chunks are one longer.
    size, longer = divmod(len(num_tokens), dp_size)
    starts = [rank * size + min(rank, longer) for rank in range(dp_size + 1)]
    before = [sum(num_tokens[a:b]) for a, b in pairwise(starts)]
    after = [sum(num_tokens[row] for row in plan.rows(rank)) for rank in range(dp_size)]
    assert got == {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
        "global_seqlen/mean": sum(num_tokens) / dp_size,
    }
    assert got["global_seqlen/balanced_min"] <= got["global_seqlen/mean"] <= got["global_seqlen/balanced_max"]


def test_seqlen_metrics_show_what_balancing_did():
    tokens = [9, 9, 1, 1]
    plan = plan_step(tokens, dp_size=2, mini_batches=[range(4)], max_tokens_per_micro_batch=10)
    got = seqlen_metrics(tokens, plan, prefix="s")
    assert (got["s/min"], got["s/max"], got["s/minmax_diff"], got["s/mean"]) == (2, 18, 16, 10)
    assert (got["s/balanced_min"], got["s/balanced_max"]) == (10, 10)


@given(st.lists(st.integers(1, CAP // 4), min_size=8, max_size=40), st.integers(1, 4))
def test_gap_between_ranks_is_at_most_one_sample(num_tokens, dp_size):
    assume(sum(num_tokens) <= CAP * dp_size * 0.75)  # one roomy micro-batch per rank: the cap dictates nothing
    plan = plan_step(num_tokens, dp_size=dp_size, mini_batches=[range(len(num_tokens))], max_tokens_per_micro_batch=CAP)
    ranks = loads(plan, np.array(num_tokens))
    assert ranks.max() - ranks.min() <= max(num_tokens)


def computed_tokens(num_tokens: list[int], tp_size: int, cp_size: int) -> int:
    """The fewest that hold the sequences, each cut into 2 * cp_size equal pieces, every cp rank's split over tp."""
    total = sum(num_tokens)
    if cp_size > 1:
        total = sum(next(n for n in range(t, t + 2 * cp_size) if n % (2 * cp_size) == 0) for t in num_tokens)
    while total % (cp_size * tp_size) or (cp_size > 1 and total % (2 * cp_size)):
        total += 1
    return total


@given(problems(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_packing_metrics(problem, tp_size, cp_size):
    num_tokens, dp_size, minis, multiple, workload = problem
    alignment = Alignment.of_layout(tp_size=tp_size, cp_size=cp_size, sequence_parallel=True)
    cap = CAP + 8
    plan = plan_step(
        num_tokens,
        dp_size=dp_size,
        mini_batches=minis,
        max_tokens_per_micro_batch=cap,
        workload_S=workload,
        micro_batch_multiple=multiple,
        alignment=alignment,
    )
    # What the engine computes, micro-batch by micro-batch: never over the cap, and the metric's padding.
    micros = [micro for rank in plan.micro_batches for mini in rank for micro in mini]
    computed = [computed_tokens([num_tokens[row] for row in micro], tp_size, cp_size) for micro in micros]
    assert max(computed) <= cap
    got = packing_metrics(num_tokens, plan)
    assert got["packing/padding_frac"] == pytest.approx(1 - sum(num_tokens) / sum(computed))
    assert got["packing/num_micro_batches"] * dp_size == len(micros)
    # No plan can have fewer tokens per micro-batch than the given, nor unequal counts.
    step = dp_size * multiple
    fewest = [ceil(ceil(sum(num_tokens[row] for row in mini) / cap) / step) * multiple for mini in minis]
    assert all(bound >= need for bound, need in zip(plan.lower_bounds, fewest, strict=True))
    assert got["packing/optimality_gap"] == pytest.approx(len(micros) / dp_size / sum(plan.lower_bounds) - 1)
    assert got["packing/optimality_gap"] >= 0


def test_optimality_gap_is_against_the_fewest_equal_counts():
    # Five samples that each need a micro-batch of their own on two ranks of 3: the bound is 3, not 2.5.
    plan = plan_step([40] * 5 + [1], dp_size=2, mini_batches=[range(6)], max_tokens_per_micro_batch=64)
    assert (plan.num_micro_batches, plan.lower_bounds) == ((3,), (3,))
    assert packing_metrics([40] * 5 + [1], plan)["packing/optimality_gap"] == 0.0
    # 9 and 10 fit together and with nothing else: six, and the bound does not see it.
    sizes = [14, 13, 13, 12, 10, 9, 9]
    plan = plan_step(sizes, dp_size=1, mini_batches=[range(7)], max_tokens_per_micro_batch=20)
    assert (plan.num_micro_batches, plan.lower_bounds) == ((6,), (4,))
    assert packing_metrics(sizes, plan)["packing/optimality_gap"] == 0.5


def test_alignment_counts_towards_the_tokens():
    # 2 x 31 tokens fit in 62, but context parallelism makes them 2 x 32.
    alignment = Alignment.of_layout(tp_size=1, cp_size=4, sequence_parallel=False)
    arguments = {"dp_size": 1, "mini_batches": [range(2)], "max_tokens_per_micro_batch": 62}
    assert plan_step([31, 31], **arguments).num_micro_batches == (1,)
    plan = plan_step([31, 31], **arguments, alignment=alignment)
    assert (plan.num_micro_batches, plan.num_padded_tokens) == ((2,), 2)
    with pytest.raises(ValueError, match=r"sample 1 has 57 tokens \(64 in this layout\), over the 56.*at least 64"):
        plan_step([31, 57], **arguments, alignment=alignment)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_alignment_is_what_the_layout_needs(tp_size, cp_size, sequence_parallel):
    alignment = Alignment.of_layout(tp_size=tp_size, cp_size=cp_size, sequence_parallel=sequence_parallel)
    for lengths in ([1], [5, 8, 13], [24, 24]):
        size = int(alignment.of_sequences(np.array(lengths)).sum())
        want = computed_tokens(lengths, tp_size if sequence_parallel else 1, cp_size)
        assert alignment.of_micro_batch(size) == want


def test_alignment_refuses_what_does_not_nest():
    with pytest.raises(ValueError, match="a multiple of sequence"):
        Alignment(sequence=4, micro_batch=6)
