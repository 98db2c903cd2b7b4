"""Advantage estimators, losses and KL penalties in pure torch, which a configuration selects by name."""

from scalerl.algorithms import policy_losses as _policy_losses
from scalerl.algorithms import token_advantages as _token_advantages
from scalerl.algorithms.advantages import (
    AdvantageEstimator,
    adv_estimator_names,
    get_adv_estimator,
    register_adv_est,
    register_token_adv_est,
)
from scalerl.algorithms.correction import Correction, correct
from scalerl.algorithms.correction_metrics import rollout_corr_metrics
from scalerl.algorithms.covariance import select_tokens, token_keys
from scalerl.algorithms.gae import gae, rewards_at_last_token
from scalerl.algorithms.kl import KL_KINDS, kl_penalty, kl_penalty_forward
from scalerl.algorithms.kl_control import KLController
from scalerl.algorithms.losses import (
    LOSS_AGG_MODES,
    LossSequences,
    aggregated,
    get_policy_loss,
    loss_weights,
    policy_loss_columns,
    policy_loss_names,
    policy_loss_needs,
    register_policy_loss,
    weighted_sum,
)
from scalerl.algorithms.masked import masked_mean, masked_var, whiten_selected
from scalerl.algorithms.objectives import PolicyObjective, SFTObjective
from scalerl.algorithms.value_objective import ValueObjective

# Importing these modules registers what they define.
del _policy_losses, _token_advantages

__all__ = [
    "KL_KINDS",
    "LOSS_AGG_MODES",
    "AdvantageEstimator",
    "Correction",
    "KLController",
    "LossSequences",
    "PolicyObjective",
    "SFTObjective",
    "ValueObjective",
    "adv_estimator_names",
    "aggregated",
    "correct",
    "gae",
    "get_adv_estimator",
    "get_policy_loss",
    "kl_penalty",
    "kl_penalty_forward",
    "loss_weights",
    "masked_mean",
    "masked_var",
    "policy_loss_columns",
    "policy_loss_names",
    "policy_loss_needs",
    "register_adv_est",
    "register_policy_loss",
    "register_token_adv_est",
    "rewards_at_last_token",
    "rollout_corr_metrics",
    "select_tokens",
    "token_keys",
    "weighted_sum",
    "whiten_selected",
]
