"""The sizes of a layout: one computation for rules, ranks, plans and checks."""

from __future__ import annotations

import itertools

import pytest

from scalerl.config import LayoutSizes, compose, trained_layout
from scalerl.config.schema import MegatronConfig
from scalerl.parallel.layout import Layout

PPO = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), list(itertools.product([1, 2, 3], [1, 2], [1, 4], [1, 2])))
def test_copies_fill_the_devices(tp: int, cp: int, pp: int, dp: int) -> None:
    megatron = MegatronConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp)
    sizes = LayoutSizes.of(megatron, tp * cp * pp * dp)
    assert (sizes.copy_size, sizes.dp_size, sizes.stage_size) == (tp * cp * pp, dp, tp * cp * dp)
    assert sizes.etp_size == sizes.experts_size == tp
    assert LayoutSizes.of(megatron) == LayoutSizes.of(megatron, tp * cp * pp)
    # The ranks' layout is these sizes, and no others.
    layout = Layout.of(megatron, tp * cp * pp * dp)
    assert vars(layout) == vars(sizes) and layout.dp_size == len(layout.output_ranks()) == dp


@pytest.mark.parametrize(
    ("megatron", "expected"),
    [
        ({}, 1),
        ({"pipeline_model_parallel_size": 4}, 1),
        ({"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 1}, 1),
        ({"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}, 4),
    ],
)
def test_micro_batches_come_in_rounds_of_an_interleaved_pipeline(megatron: dict[str, int], expected: int) -> None:
    assert LayoutSizes.of(MegatronConfig(**megatron)).micro_batch_multiple == expected


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "num_tokens", "expected"),
    [
        (1, 1, True, 7, 7),
        (4, 1, True, 7, 8),
        (4, 1, False, 7, 7),
        # A sequence takes a multiple of 2 * cp.
        (1, 2, True, 7, 8),
        # And a micro-batch one of lcm(4, 2 * 3) = 12.
        (3, 2, True, 7, 12),
        (3, 2, False, 7, 8),
    ],
)
def test_tokens_of_a_micro_batch_of_one_sequence(
    tp: int, cp: int, sequence_parallel: bool, num_tokens: int, expected: int
) -> None:
    sizes = LayoutSizes(tp * cp, tp_size=tp, cp_size=cp)
    assert sizes.padded_tokens(num_tokens, sequence_parallel=sequence_parallel) == expected


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("tensor_model_parallel_size", 2, "tp_size"),
        ("pipeline_model_parallel_size", 2, "pp_size"),
        ("context_parallel_size", 2, "cp_size"),
        ("expert_model_parallel_size", 2, "ep_size"),
        ("expert_tensor_parallel_size", 2, "etp_size"),
        ("virtual_pipeline_model_parallel_size", 2, "vpp_size"),
        ("num_layers_in_first_pipeline_stage", 2, "first_stage_layers"),
        ("num_layers_in_last_pipeline_stage", 2, "last_stage_layers"),
    ],
)
def test_each_key_is_a_size(key: str, value: int, field: str) -> None:
    assert getattr(LayoutSizes.of(MegatronConfig(**{key: value}), 8), field) == value


def test_the_layout_that_a_program_trains() -> None:
    cfg = compose("ppo", [*PPO, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.nnodes=2"])
    assert trained_layout(cfg) == LayoutSizes(16, tp_size=2, etp_size=2)
    sft = compose("sft", ["data.train_files=a", "model.path=m", "megatron.context_parallel_size=4"])
    assert trained_layout(sft).dp_size == 2
