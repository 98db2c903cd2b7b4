"""Decides whether the actor's update of a step computes the old log-probs too, which saves a separate forward pass."""

from __future__ import annotations

from scalerl.algorithms.advantages import get_adv_estimator
from scalerl.algorithms.losses import SELECTED, policy_loss_needs
from scalerl.config import PPOConfig
from scalerl.config.correction import corrects

# Fields of `override_transformer_config` that, where not 0, make a model compute differently in training mode.
TRAINING_NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def is_one_pass_enough(config: PPOConfig, step: int) -> bool:
    """Whether the step's update computes the old log-probs anyway, and nothing needs them before the update.

    The update computes them if the weights do not change before: one mini-batch, one epoch, no noise in training.
    A correction of the sampler's log-probs, the KL in the rewards, some estimators, and losses that single out tokens
    need them before.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction, overrides = algorithm.rollout_correction, actor.megatron.override_transformer_config
    is_updated = step > config.trainer.critic_warmup
    is_one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == config.data.train_batch_size
    is_exact = not any(overrides.get(name) for name in TRAINING_NOISE) and (
        overrides.get("moe_router_load_balancing_type") != "sinkhorn"
    )
    is_asked_for = (
        corrects(correction)
        or algorithm.use_kl_in_reward
        or "old_logprobs" in get_adv_estimator(algorithm.adv_estimator).needs
        or SELECTED in policy_loss_needs(actor.policy_loss.loss_mode)
    )
    return is_updated and is_one_update and is_exact and not is_asked_for and not correction.bypass_mode
