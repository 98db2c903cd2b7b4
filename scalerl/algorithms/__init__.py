"""Advantages, losses and KL in pure torch, chosen by name."""

from scalerl.algorithms.advantages import adv_estimator_names, get_adv_estimator, register_adv_est
from scalerl.algorithms.correction import Correction, correct
from scalerl.algorithms.correction_metrics import rollout_corr_metrics
from scalerl.algorithms.gae import gae, rewards_at_last_token
from scalerl.algorithms.kl import KL_KINDS, kl_penalty_forward
from scalerl.algorithms.losses import (
    LOSS_AGG_MODES,
    get_policy_loss,
    loss_weights,
    policy_loss_names,
    register_policy_loss,
    weighted_sum,
)
from scalerl.algorithms.masked import logprobs_from_logits, masked_mean, masked_var, masked_whiten
from scalerl.algorithms.objectives import PolicyObjective, SFTObjective
from scalerl.algorithms.value_objective import ValueObjective

__all__ = [
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "Correction",
    "PolicyObjective",
    "SFTObjective",
    "ValueObjective",
    "adv_estimator_names",
    "correct",
    "gae",
    "get_adv_estimator",
    "get_policy_loss",
    "kl_penalty_forward",
    "logprobs_from_logits",
    "loss_weights",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "policy_loss_names",
    "register_adv_est",
    "register_policy_loss",
    "rewards_at_last_token",
    "rollout_corr_metrics",
    "weighted_sum",
]
