"""The columns of a step's batch: name, dtype, shape and meaning of each. T tokens of prompt and response, S rows.

Rows of pictures have lengths that say nothing of the tokens (`Jagged.per_token`): N patches, I pictures of all rows.

A row is a sample, or one trajectory of a sample that has several (`episodes`).

`shard[OLD_LOGPROBS]` is the `Jagged` of a token column or the array of a sample column. A run may have more columns:
those that a user's reward function or data brings for a loss or an estimator of the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from scalerl.batch.jagged import Jagged

V = TypeVar("V", Jagged, np.ndarray)


@dataclass(frozen=True)
class Column(Generic[V]):
    """A column of a batch.  dtype: of numpy and torch.  shape: S of a sample column, else rows and their dimensions."""

    name: str
    dtype: str
    shape: str
    meaning: str

    def __str__(self) -> str:
        return self.name


COLUMNS: dict[str, Column] = {}


def _tokens(name: str, dtype: str, meaning: str, shape: str = "T") -> Column[Jagged]:
    column: Column[Jagged] = Column(name, dtype, shape, meaning)
    COLUMNS[name] = column
    return column


def _samples(name: str, dtype: str, meaning: str) -> Column[np.ndarray]:
    column: Column[np.ndarray] = Column(name, dtype, "S", meaning)
    COLUMNS[name] = column
    return column


# --- tokens: what the rollout makes ---
INPUT_IDS = _tokens("input_ids", "int64", "the tokens")
RESPONSE_MASK = _tokens("response_mask", "bool", "whether the policy sampled the token")
ROLLOUT_LOGPROBS = _tokens("rollout_logprobs", "float32", "log-prob by the sampler; 0 where it sampled nothing")
POLICY_VERSIONS = _tokens("policy_versions", "int32", "version of the weights that sampled the token; -1: none")
# --- tokens: what the trainer makes; a column of log-probs has at a token the log-prob given the tokens before it ---
OLD_LOGPROBS = _tokens("old_logprobs", "float32", "log-prob by the weights before the step's first update")
REF_LOGPROBS = _tokens("ref_logprobs", "float32", "log-prob by the frozen reference model")
VALUES = _tokens("values", "float32", "the critic's value of the state in which the token was chosen")
RETURNS = _tokens("returns", "float32", "target of the critic's value")
TOKEN_ADVANTAGES = _tokens("advantages", "float32", "advantage of the token")
ROLLOUT_IS_WEIGHTS = _tokens("rollout_is_weights", "float32", "weight of the token's loss that corrects the sampler")
LOSS_MASK = _tokens("loss_mask", "bool", "response_mask without the tokens that the correction rejects")
SELECTED = _tokens("selected", "bool", "whether the token has one of the greatest covariances (clip_cov, kl_cov)")
TEACHER_IDS = _tokens("teacher_ids", "int32", "words that the reference model finds likeliest there", "T, k")
TEACHER_LOGPROBS = _tokens("teacher_logprobs", "float32", "log-probs of these words by the reference model", "T, k")
ROUTED_EXPERTS = _tokens("routed_experts", "uint8", "experts that routers chose (models/routing.py)", "T, layers, k")
# --- pictures of the rows: what the data brings; absent where no row of the batch has a picture ---
PIXEL_VALUES = _tokens("pixel_values", "float32", "patches of the pictures, by the model's processor", "N, numbers")
IMAGE_GRID_THW = _tokens("image_grid_thw", "int32", "patches of each picture in time, height and width", "I, 3")

# --- samples: what the rollout makes ---
UID = _samples("uid", "int64", "number of the sample's group, unique in a run")
PROMPT_UID = _samples("prompt_uid", "int64", "row of the prompt in its data set")
SAMPLE_INDEX = _samples("sample_index", "int64", "position of the sample in its group")
TRAJECTORY_INDEX = _samples("trajectory_index", "int64", "position of the trajectory in its sample")
AGENT = _samples("agent", "object", "name of the agent that acts in the trajectory; empty where none has a name")
SEED = _samples("seed", "int64", "seed that the sample was drawn with")
PROMPT_LENGTH = _samples("prompt_length", "int64", "tokens of the prompt")
PROMPT_LENGTH_BEFORE = _samples("prompt_length_before", "int64", "tokens of the prompt before it was truncated")
RESPONSE_LENGTH = _samples("response_length", "int64", "tokens after the prompt")
NUM_SAMPLED_TOKENS = _samples("num_sampled_tokens", "int64", "tokens that the policy sampled")
NUM_TURNS = _samples("num_turns", "int64", "requests to the policy")
TURN_LENGTHS = _samples("turn_lengths", "object", "tokens that each of the trajectory's turns sampled, a tuple")
TURN_REWARDS = _samples("turn_rewards", "object", "reward of each of the trajectory's turns, a tuple")
SCORE = _samples("score", "float64", "result of the reward function or the reward model, and the rewards of turns")
REWARD_FAILED = _samples("reward_failed", "bool", "whether the reward function failed")
REWARD_PENALTY = _samples("reward_penalty", "float64", "penalty that is added to the score, at most 0")
POLICY_VERSION = _samples("policy_version", "int64", "version of the weights that began the sample")
FINISH_REASON = _samples("finish_reason", "object", "why the response ended: stop, length, ...")
DATA_SOURCE = _samples("data_source", "object", "the data set that the prompt comes from")
REWARD_STYLE = _samples("reward_style", "object", "rule, model or judge: who scores the sample")
REWARD_EXTRA = _samples("reward_extra", "object", "dict that the reward function returned with the score")
REWARD_ERROR = _samples("reward_error", "object", "why the reward function failed; empty: it did not")
# Absent where no row of the batch has a picture.
PICTURE_PATCHES = _samples("picture_patches", "object", "patches of each of the row's pictures, a tuple")
# --- samples: what the trainer makes ---
BASELINE_SCORE = _samples("baseline_score", "float64", "reward of a greedy response to the prompt (remax)")
REWARDS = _samples("rewards", "float64", "score and penalty, less the KL with use_kl_in_reward")
REWARD_AFTER = _samples("reward_after", "float64", "rewards of the episode less those of turns up to the row's last")
TURNS_BEFORE = _samples("turns_before", "int64", "turns of the episode in earlier rows (`turns`)")
TURN_ADVANTAGES = _samples("turn_advantages", "object", "advantage of each of the trajectory's turns, a tuple")
NUM_LOSS_TOKENS = _samples("num_loss_tokens", "int64", "tokens of loss_mask")
EPISODE_LOSS_TOKENS = _samples("episode_loss_tokens", "int64", "loss tokens of all rows of the episode (`episodes`)")
REWARD_KL = _samples("reward_kl", "float64", "KL to the reference, summed over the sampled tokens")
SCORES = _samples("scores", "float32", "output of the reward model after the last token")
# A column that the engine makes for an objective: the policy's log-probs of teacher_ids, [T, k], with a gradient.
LOGPROBS_OF_TEACHER_IDS = "logprobs_of_teacher_ids"
# An estimator of samples makes one advantage for each sample, an estimator of tokens one for each token.
SAMPLE_ADVANTAGES: Column[np.ndarray] = Column("advantages", "float32", "S", "advantage of all tokens of the sample")
