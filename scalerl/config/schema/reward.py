"""The sections of rewards: reward functions, their managers, a reward model, a judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from scalerl.config.names import REWARD_MANAGERS
from scalerl.config.schema.devices import ResourcePoolConfig
from scalerl.config.schema.fields import Place, check, key, same_as, share
from scalerl.config.schema.model import MegatronConfig, MicroBatchConfig, ModelCodeConfig, as_actor
from scalerl.config.schema.rollout import ServerConfig
from scalerl.config.servers import ReplicaRoom, replica_violations
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
    # Give the functions the row's images, as bytes or paths, in extra_info["images"].
    with_images: bool = False


@dataclass
class ScoringModelConfig(ModelCodeConfig):
    """The files of a reward model or of a judge."""

    # Directory of the model; required with enable. A reward model has a score head of one number (architectures
    # *ForSequenceClassification) and the policy's tokenizer; a judge has a tokenizer and a chat template.
    path: str | None = key(None, or_null(TEXT))


@dataclass
class JudgeConfig(ServerConfig):
    """A language model that scores samples, with servers on devices of its own."""

    # Score the samples of prompts whose reward_model.style is "judge" by what a language model writes of them.
    enable: bool = False
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
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
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)

    @check("enable", "model", "resource_pool")
    def model_and_devices(self, at: Place) -> Iterator[str]:
        path, pool = self.model.path, self.resource_pool
        lacks = [] if path is not None else [f"{at('model.path')}=DIRECTORY"]
        if not pool.nnodes:
            per_node = at("resource_pool.n_gpus_per_node")
            lacks += [f"{at('resource_pool.nnodes')}=1", f"{per_node}={pool.n_gpus_per_node}"]
        if self.enable and lacks:
            yield (
                f"{at('enable')} = true: needs the directory of a language model, and separate devices, as the judge "
                f"writes while the policy generates; set {' and '.join(lacks)}, or {at('enable')}=false"
            )
        given = {at("model.path"): path, at("resource_pool.nnodes"): pool.nnodes}
        unused = {key: value for key, value in given.items() if value}
        if unused and not self.enable:
            key, value = next(iter(unused.items()))
            yield (
                f"{key} = {value}: has no effect when {at('enable')} = false; set "
                f"{' and '.join([at('enable') + '=true', *lacks])}, or leave {' and '.join(unused)} out"
            )

    @check("enable", "name", "tensor_model_parallel_size", "num_replicas", "resource_pool")
    def replicas_fit(self, at: Place) -> Iterator[str]:
        pool = self.resource_pool
        if self.enable and pool.nnodes:
            room = ReplicaRoom(pool.nnodes, pool.n_gpus_per_node, self.tensor_model_parallel_size)
            yield from replica_violations(self, at.prefix.rstrip("."), room, at("resource_pool"))

    @check("enable", "min_score", "max_score")
    def range_of_scores(self, at: Place) -> Iterator[str]:
        low, high = self.min_score, self.max_score
        if self.enable and low >= high:
            yield (
                f"{at('min_score')} = {low:g}: must be below {at('max_score')} = {high:g}, or every sample has the "
                f"same score; set {at('max_score')}={low + 1:g} or more"
            )


@dataclass
class OverlongBufferConfig:
    """The penalty of responses that come near their limit of tokens."""

    # With reward_manager=dapo: lower the score of responses that end in the last `len` tokens of max_resp_len.
    enable: bool = False
    # Tokens of the buffer. The paper (arXiv 2503.14476) has 4096 of 20480.
    len: int = key(share(5, "reward_model.overlong_buffer.max_resp_len"), at_least(0))
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

    # Score the samples of prompts whose reward_model.style is "model" with reward_model.model; the others keep the
    # reward function's score.
    enable: bool = False
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    megatron: MegatronConfig = field(default_factory=as_actor)
    resource_pool: ResourcePoolConfig = field(default_factory=ResourcePoolConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    @check("enable", "model.path")
    def model_given(self, at: Place) -> Iterator[str]:
        path = self.model.path
        if self.enable and path is None:
            yield (
                f"{at('model.path')} = null: needed when {at('enable')} = true; set {at('model.path')}=DIRECTORY, of a "
                f"model with a score head, or {at('enable')}=false"
            )
        if path is not None and not self.enable:
            yield (
                f"{at('model.path')} = {path}: has no effect when {at('enable')} = false; set {at('enable')}=true, or "
                f"{at('model.path')}=null"
            )

    @check("reward_manager", "overlong_buffer")
    def overlong_buffer_is_read(self, at: Place) -> Iterator[str]:
        buffer, manager = self.overlong_buffer, self.reward_manager
        # A manager of the user's own may read these keys.
        if buffer.enable and manager in REWARD_MANAGERS.own and manager != "dapo":
            yield (
                f"{at('overlong_buffer.enable')} = true: has no effect when {at('reward_manager')} = {manager}; set "
                f"{at('reward_manager')}=dapo, or {at('overlong_buffer.enable')}=false"
            )
