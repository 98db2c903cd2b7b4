"""What a token holds that does not count changes nothing: in no column, no loss, no aggregation, no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalerl.algorithms import (
    LOSS_AGG_MODES,
    PolicyObjective,
    SFTObjective,
    ValueObjective,
    correct,
    get_adv_estimator,
    policy_loss_names,
    rewards_at_last_token,
    select_tokens,
)
from scalerl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from scalerl.tracking.metrics import (
    explained_variance_sums,
    largest_differences,
    mismatch_metrics,
    rollout_diff_sums,
    token_stat_sums,
)

LENGTHS = [4, 1, 6, 2, 5]
CU_SEQLENS = torch.tensor([0, *np.cumsum(LENGTHS)])
# Two tokens of alignment behind the last sequence.
NUM_TOKENS = int(CU_SEQLENS[-1]) + 2

seeds = st.integers(0, 9999)
poisons = st.sampled_from([math.nan, math.inf, -math.inf])


def draw(seed: int, *names: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A mask with tokens in at least two sequences, and columns of log-prob-like numbers, [T] float64."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(NUM_TOKENS, generator=generator) < 0.6
    mask[0] = mask[6] = True
    mask[CU_SEQLENS[-1] :] = False
    columns = {name: -torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64) * 3 for name in names}
    if "advantages" in columns:
        columns["advantages"] = torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    return mask, columns


def poisoned(columns: dict[str, Tensor], mask: Tensor, poison: float) -> dict[str, Tensor]:
    return {name: torch.where(mask, column, poison) for name, column in columns.items()}


def counts(mask: Tensor) -> tuple[int, int]:
    rows = [bool(part.any()) for part in mask[: CU_SEQLENS[-1]].split(LENGTHS)]
    return int(mask.sum()), sum(rows)


def outcome(objective: Callable, given: dict[str, Tensor], fixed: dict[str, Tensor], learned: tuple[str, ...]) -> Any:
    """Loss, metrics, and gradients of what is learned, to be compared bit by bit."""
    leaves = [given[name].clone().requires_grad_() for name in learned]
    columns = {name: column for name, column in given.items() if name not in learned}
    loss, metrics = objective(*leaves, columns | fixed | {"cu_seqlens": CU_SEQLENS})
    loss.backward()
    gradients = [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
    return loss.item(), {name: value.item() for name, value in metrics.items()}, gradients


def policy_config(name: str, mode: str, **more: Any) -> ActorConfig:
    loss = PolicyLossConfig(loss_mode=name, dro_beta=0.3, ppo_kl_coef=0.5)
    return ActorConfig(loss_agg_mode=mode, loss_scale_factor=9.0, policy_loss=loss, clip_ratio_c=1.5, **more)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", policy_loss_names())
@settings(max_examples=4)
@given(seed=seeds, poison=poisons, kl=st.sampled_from(["k1", "k2", "k3", "abs", "k1+", "k3+"]))
def test_policy_objective(name, mode, corrected, seed, poison, kl):
    columns = ("logprobs", "entropy", "old_logprobs", "ref_logprobs", "advantages", "rollout_is_weights")
    mask, clean = draw(seed, *columns)
    clean["rollout_is_weights"] = clean["rollout_is_weights"].abs()
    config = policy_config(name, mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kl)
    objective = PolicyObjective(config, *counts(mask), corrected=corrected)
    selected = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.3
    fixed = {"loss_mask" if corrected else "response_mask": mask}
    learned = ("logprobs", "entropy")
    want = outcome(objective, clean, fixed | {"selected": selected & mask}, learned)
    assert all(math.isfinite(value) for value in (want[0], *want[1].values(), *want[2][0], *want[2][1]))
    assert outcome(objective, poisoned(clean, mask, poison), fixed | {"selected": selected | ~mask}, learned) == want


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=10)
@given(seed=seeds, poison=poisons)
def test_value_objective(mode, seed, poison):
    mask, clean = draw(seed, "new", "values", "returns")
    objective = ValueObjective(CriticConfig(loss_agg_mode=mode, loss_scale_factor=9.0), *counts(mask))
    fixed = {"response_mask": mask}
    want = outcome(objective, clean, fixed, ("new",))
    assert outcome(objective, poisoned(clean, mask, poison), fixed, ("new",)) == want


@settings(max_examples=10)
@given(seed=seeds, poison=poisons)
def test_sft_objective(seed, poison):
    mask, clean = draw(seed, "logprobs")
    objective = SFTObjective(counts(mask)[0])

    def of_logprobs(logprobs_T: Tensor, columns: dict[str, Tensor]) -> Any:
        return objective(logprobs_T, None, columns)

    fixed = {"response_mask": mask}
    want = outcome(of_logprobs, clean, fixed, ("logprobs",))
    assert outcome(of_logprobs, poisoned(clean, mask, poison), fixed, ("logprobs",)) == want


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
@settings(max_examples=10)
@given(seed=seeds, poison=poisons)
def test_advantages_of_tokens(name, seed, poison):
    mask, clean = draw(seed, "values")
    scores_S = torch.rand(len(LENGTHS), generator=torch.Generator().manual_seed(seed))
    mask, values = mask[: CU_SEQLENS[-1]], clean["values"][: CU_SEQLENS[-1]].float()
    rewards = rewards_at_last_token(scores_S, mask, CU_SEQLENS)
    estimator = get_adv_estimator(name)

    def run(rewards_T: Tensor, values_T: Tensor) -> list[list[float]]:
        more = {"values": values_T, "baseline_score": scores_S}
        columns = estimator(
            rewards_T, mask, CU_SEQLENS, AlgorithmConfig(), **{key: more[key] for key in estimator.needs}
        )
        return [column.tolist() for column in columns]

    dirty = [torch.where(mask, column, poison) for column in (rewards, values)]
    assert run(*dirty) == run(rewards, values)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@settings(max_examples=10)
@given(seed=seeds, poison=poisons)
def test_tokens_chosen_by_covariance(name, seed, poison):
    mask, clean = draw(seed, "old_logprobs", "advantages")
    config = PolicyLossConfig(name, clip_cov_ratio=0.3, clip_cov_lb=-1.0, kl_cov_ratio=0.3)
    keys = torch.arange(NUM_TOKENS)

    def run(columns: dict[str, Tensor]) -> list[bool]:
        return select_tokens(*columns.values(), mask, keys, config, counts(mask)[0]).tolist()

    assert run(poisoned(clean, mask, poison)) == run(clean)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(max_examples=10)
@given(seed=seeds, poison=poisons, threshold=st.sampled_from([2.0, [0.5, 2.0]]), normalize=st.booleans())
def test_correction(level, seed, poison, threshold, normalize):
    mask, clean = draw(seed, "rollout_logprobs", "old_logprobs")
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs="token_k1,seq_mean_k3",
        rollout_rs_threshold=2.0,
        rollout_token_veto_threshold=0.1,
    )

    def run(columns: dict[str, Tensor]) -> Any:
        correction = correct(*columns.values(), mask, CU_SEQLENS, config)
        tensors = (correction.weights_T, correction.mask_T, correction.num_loss_tokens_S)
        return [tensor.tolist() for tensor in tensors], correction.metrics

    assert run(poisoned(clean, mask, poison)) == run(clean)


@settings(max_examples=10)
@given(seed=seeds, poison=poisons)
def test_metrics_of_tokens(seed, poison):
    mask, clean = draw(seed, "rollout_logprobs", "old_logprobs")

    def run(columns: dict[str, Tensor]) -> Any:
        pair = list(columns.values())
        worst = [column.tolist() for column in largest_differences(*pair, mask, CU_SEQLENS)]
        sums = rollout_diff_sums(*pair, mask) | explained_variance_sums(*pair, mask)
        return repr((worst, sums, mismatch_metrics(*pair, mask, CU_SEQLENS), token_stat_sums("x", pair[0], mask)))

    assert run(poisoned(clean, mask, poison)) == run(clean)
