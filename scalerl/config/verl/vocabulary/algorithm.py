"""Keys of verl's `algorithm` section."""

from __future__ import annotations

from scalerl.config.verl.entry import absent, goes_with, renamed, same
from scalerl.config.verl.vocabulary.words import OFF

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
        "algorithm.filter_groups.metric", "algorithm.filter_groups.metric", only=(None,), convert=lambda _: "score"
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
        "algorithm.(rollout_is|rollout_is_threshold|rollout_rs|rollout_rs_threshold|rollout_token_veto_threshold)",
        r"algorithm.rollout_correction.\1",
    ),
    absent(
        "algorithm.(rollout_is_threshold_lower|rollout_is_level|rollout_is_mode)",
        None,
        why="a threshold has both bounds",
        instead="set algorithm.rollout_correction.rollout_is_threshold=[lower,upper]",
    ),
    absent("algorithm.(f_norm|alpha)", 1, None, why="gpg has it at 1"),
]
