"""The sections of rewards: reward functions, their managers, a reward model, a judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scalerl.config.schema.devices import JudgePoolConfig, ResourcePoolConfig
from scalerl.config.schema.fields import key, same_as
from scalerl.config.schema.model import MegatronConfig, MicroBatchConfig, OptionalModelConfig, as_actor
from scalerl.config.schema.rollout import ServerConfig
from scalerl.config.value_checks import FINITE, NOT_ZERO, PATTERN, TEXT, WEIGHTS, above, at_least, one_of, or_null


@dataclass
class CustomRewardFunctionConfig:
    """A reward function of the user's own."""

    # Python file with the reward function; null: the rule for each row's data_source.
    path: str | None = key(None, or_null(TEXT))
    name: str = key("compute_score", TEXT)
    # Several functions of the file in place of `name`, with the weight of each in the sum that is the score.
    weights: dict[str, Any] = key({}, WEIGHTS)
    # Keyword arguments for every call of every function.
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoringModelConfig(OptionalModelConfig):
    """The files of a reward model."""

    # Directory of a model with a score head of one number (architectures *ForSequenceClassification) and the policy's
    # tokenizer; required with reward_model.enable.
    path: str | None = OptionalModelConfig.path


@dataclass
class JudgeModelConfig(OptionalModelConfig):
    """The files of a judge."""

    # Directory of a language model, with a tokenizer and chat template of its own; required with judge.enable.
    path: str | None = OptionalModelConfig.path


@dataclass
class JudgeConfig(ServerConfig):
    """A language model that scores samples, with servers on devices of its own."""

    # Score the samples of prompts whose reward_model.style is "judge" by what a language model writes of them.
    enable: bool = False
    model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    # Text file, the judge's question: {prompt}, {response} and {ground_truth} stand for those of the sample, and
    # {response} must be there. null: scalerl's own (docs/rewards.md).
    prompt_path: str | None = key(None, or_null(TEXT))
    # Regular expression with one group, which is a number; of several matches in the judge's text the last one counts.
    pattern: str = key(r"Score:\s*(-?\d+(?:\.\d+)?)", PATTERN)
    # A number below this has failed.
    min_score: float = key(0.0, FINITE)
    # A number above this has failed.
    max_score: float = key(10.0, FINITE)
    # The sample's score is the judge's number times this.
    scale: float = key(0.1, NOT_ZERO)
    # Tokens of the question, chat template included; a sample with a longer one has failed.
    max_prompt_length: int = key(8192, at_least(1))
    # Tokens that the judge may write.
    max_response_length: int = key(1024, at_least(1))
    # Keep the judge's text as judge_response beside the score, for the dumps of trainer.rollout_data_dir.
    keep_text: bool = False
    # 0: greedy.
    temperature: float = key(0.0, at_least(0))
    # null: as many as fit on resource_pool.
    num_replicas: int | None = ServerConfig.num_replicas
    resource_pool: JudgePoolConfig = field(default_factory=JudgePoolConfig)


@dataclass
class OverlongBufferConfig:
    """The penalty of responses that come near their limit of tokens."""

    # With reward_manager=dapo, then the default: lower the score of responses that end in the last `len` tokens of
    # max_resp_len.
    enable: bool = False
    # Tokens of the buffer. Not set, with enable: a fifth of max_resp_len.
    len: int = key(0, at_least(0))
    # What is taken off at max_resp_len; less before, in proportion to the tokens in the buffer.
    penalty_factor: float = key(1.0, at_least(0))
    # Tokens at which the buffer ends.
    max_resp_len: int = key(same_as("data.max_response_length"), at_least(1))
    # Add overlong (0 or 1) and overlong_reward (the penalty) to the values beside the score.
    log: bool = False


@dataclass
class RewardManagerConfig:
    """The keys that the `reward_model` sections of `scalerl train` and `scalerl eval` have in common."""

    # naive | batch | dapo | prime, or a name registered with rewards.register_reward_manager.
    reward_manager: str = key("naive", TEXT)
    # Seconds that scoring one sample may take; with reward_manager=batch, one call.
    timeout_s: float = key(60.0, above(0))
    # stop: a reward function that raises, hangs or returns NaN ends the run, and so does a judge that gives no number.
    # zero: the sample counts as wrong, is compared with no other, and is counted (docs/rewards.md).
    on_error: str = key("stop", one_of("stop", "zero"))


@dataclass
class RewardModelConfig(MicroBatchConfig, RewardManagerConfig):
    """`reward_model` of `scalerl train`."""

    # naive | batch | dapo | prime, or a name registered with rewards.register_reward_manager. Not set: dapo with
    # overlong_buffer.enable.
    reward_manager: str = RewardManagerConfig.reward_manager
    # Score the samples of prompts whose reward_model.style is "model" with reward_model.model; the others keep the
    # reward function's score.
    enable: bool = False
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    megatron: MegatronConfig = field(default_factory=as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class EvalRewardConfig(RewardManagerConfig):
    """`reward_model` of `scalerl eval`."""

    # stop: a reward function that raises, hangs or returns NaN ends the program. zero: the response counts as wrong
    # and is counted.
    on_error: str = RewardManagerConfig.on_error
