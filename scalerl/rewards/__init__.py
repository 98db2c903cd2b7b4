"""Scoring of responses: rules by data source, functions from a user's file, and the managers that call them."""

from __future__ import annotations

from scalerl.rewards.default_score import default_compute_score, register_reward
from scalerl.rewards.errors import RewardError
from scalerl.rewards.manager import (
    NaiveRewardManager,
    RewardManager,
    ScoreRequest,
    ScoreResult,
    build_reward_manager,
    get_reward_manager,
    register_reward_manager,
)
from scalerl.rewards.manager_variants import BatchRewardManager, DAPORewardManager, PrimeRewardManager
from scalerl.rewards.reward_function import RewardFunction, load_reward_function
from scalerl.rewards.trial import TRIAL_RESPONSE

__all__ = [
    "TRIAL_RESPONSE",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "ScoreRequest",
    "ScoreResult",
    "build_reward_manager",
    "default_compute_score",
    "get_reward_manager",
    "load_reward_function",
    "register_reward",
    "register_reward_manager",
]
