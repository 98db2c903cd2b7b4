"""Keys of verl's `algorithm` section."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.entry import Becomes, Context, Outcome, absent, computed, goes_with, renamed, same
from scalerl.extras.verl.keys.vocabulary.words import OFF


def _importance_weights(_: re.Match[str], value: Any, context: Context) -> Outcome:
    """Reads the switch of weights in older scripts, whose level is another key; newer ones have the level here."""
    if value is True:
        value = context.foreign("algorithm.rollout_is_level") or "token"
    return Becomes({"algorithm.rollout_correction.rollout_is": value or None}, "the level at which ratios are taken")


ALGORITHM = [
    renamed(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        only=("grpo_vectorized",),
        convert=lambda _: "grpo",
        why="the same estimator",
    ),
    renamed(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        only=("rloo_vectorized",),
        convert=lambda _: "rloo",
        why="the same estimator",
    ),
    renamed(
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.metric",
        only=(None, "seq_reward", "seq_final_reward"),
        convert=lambda _: "score",
        why="groups are compared before penalties",
    ),
    renamed(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches",
        only=(0, -1, None),
        convert=lambda _: 1_000_000,
        why="no limit",
    ),
    same("algorithm.filter_groups.max_inflight_gen_batches", why="rounds follow each other"),
    absent(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        None,
        why="a threshold has both bounds",
        instead="set algorithm.rollout_correction.rollout_rs_threshold=[lower,upper]",
    ),
    absent(
        "algorithm.rollout_correction.use_policy_gradient",
        *OFF,
        why="actor.policy_loss.loss_mode says the loss",
        instead="set it to gpg",
    ),
    absent("algorithm.use_pf_ppo", *OFF, why="samples are not drawn again by their scores"),
    goes_with("algorithm.pf_ppo.*", "algorithm.use_pf_ppo"),
    goes_with("algorithm.gdpo_*", "algorithm.adv_estimator=gdpo"),
    same("algorithm.rollout_correction.loss_type", "ppo_clip", why="actor.policy_loss.loss_mode says the loss"),
    renamed(
        "algorithm.(rollout_is_threshold|rollout_rs|rollout_rs_threshold|rollout_token_veto_threshold)",
        r"algorithm.rollout_correction.\1",
    ),
    renamed("algorithm.rollout_is_veto_threshold", "algorithm.rollout_correction.rollout_token_veto_threshold"),
    computed(
        "algorithm.rollout_is",
        "`algorithm.rollout_correction.rollout_is`, at the level of `algorithm.rollout_is_level`",
        "the level at which ratios are taken",
        _importance_weights,
    ),
    goes_with("algorithm.rollout_is_level", "algorithm.rollout_is"),
    absent(
        "algorithm.(rollout_is_threshold_lower|rollout_is_mode)",
        "truncate",
        None,
        why="a threshold has both bounds",
        instead="set algorithm.rollout_correction.rollout_is_threshold=[lower,upper]",
    ),
    absent("algorithm.(f_norm|alpha)", 1, None, why="gpg has it at 1"),
]
