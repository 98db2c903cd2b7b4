"""The configuration of each command, put together from the sections; `ppo` has that of `scalerl train`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from scalerl.config.layout import DEVICE_KEYS, LayoutSizes, alignment_keys, layout_keys, tokens_needed
from scalerl.config.layout_checks import flash_attention_violations, whole_copies
from scalerl.config.schema.data import EvalDataConfig, GenerationDataConfig, SFTDataConfig
from scalerl.config.schema.devices import DevicesConfig
from scalerl.config.schema.fields import Place, check
from scalerl.config.schema.launch import LaunchConfig
from scalerl.config.schema.model import MegatronConfig, ModelConfig, OptimConfig, TrainedModelConfig
from scalerl.config.schema.ppo import PPOConfig
from scalerl.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig
from scalerl.config.schema.rollout import GenerationRolloutConfig
from scalerl.config.schema.trainer import (
    BEST_METRIC,
    SFTTrainerConfig,
    UserFilesConfig,
    best_checkpoint_violations,
)
from scalerl.config.servers import ReplicaRoom, replica_violations


@dataclass
class SFTConfig:
    """Configuration of `scalerl sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: TrainedModelConfig = field(default_factory=TrainedModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)

    @check(*layout_keys("megatron", "trainer"))
    def devices_hold_whole_copies(self, at: Place) -> Iterator[str]:
        yield from whole_copies(self.megatron, self.trainer, "megatron", "trainer")

    @check("trainer.flash_attention_impl", "megatron.cp_comm_type", "megatron.dtype")
    def flash_attention_is_called(self, at: Place) -> Iterator[str]:
        yield from flash_attention_violations(self.trainer.flash_attention_impl, self.megatron, "megatron")

    @check("data.train_batch_size", *layout_keys("megatron", "trainer"))
    def batch_feeds_ranks(self, at: Place) -> Iterator[str]:
        batch = self.data.train_batch_size
        needed, ranks = LayoutSizes.of(self.megatron, self.trainer.num_devices).fewest_samples
        if batch < needed:
            yield (
                f"data.train_batch_size = {batch}: must be at least the {ranks}; set data.train_batch_size={needed} or "
                "more, or train on fewer devices"
            )

    @check("data.max_length", "data.max_tokens_per_micro_batch", *alignment_keys("megatron"))
    def longest_conversation_fits(self, at: Place) -> Iterator[str]:
        key, tokens = "data.max_tokens_per_micro_batch", self.data.max_tokens_per_micro_batch
        needed = tokens_needed(self.data.max_length, self.megatron)
        if tokens < needed:
            yield (
                f"{key} = {tokens}: must hold the longest conversation, data.max_length = {self.data.max_length}; set "
                f"{key}={needed} or more"
            )

    @check("trainer.test_freq", "trainer.best_ckpt_to_keep", "data.val_files")
    def data_to_validate_on(self, at: Place) -> Iterator[str]:
        # What the best checkpoints lack is said together.
        if self.trainer.test_freq > 0 and not self.trainer.best_ckpt_to_keep and self.data.val_files is None:
            yield (
                f"trainer.test_freq = {self.trainer.test_freq}: there is nothing to validate on while data.val_files = "
                "null; set data.val_files=FILE, or trainer.test_freq=-1"
            )

    @check(
        "trainer.best_ckpt_to_keep",
        "trainer.best_ckpt_metric",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.test_freq",
        "trainer.save_freq",
        "data.val_files",
    )
    def best_checkpoints(self, at: Place) -> Iterator[str]:
        has_val_files = self.data.val_files is not None
        yield from best_checkpoint_violations(self.trainer, BEST_METRIC["sft"], has_val_files=has_val_files)


@dataclass
class GenerationConfig:
    """Configuration of `scalerl generate`."""

    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    trainer: DevicesConfig = field(default_factory=DevicesConfig)

    @check("data.n_samples", "rollout.temperature")
    def greedy_once(self, at: Place) -> Iterator[str]:
        if self.data.n_samples > 1 and self.rollout.temperature == 0:
            yield (
                f"data.n_samples = {self.data.n_samples}: greedy decoding (rollout.temperature = 0) gives the same "
                "response each time; set rollout.temperature=1, or data.n_samples=1"
            )

    @check("rollout.name", "rollout.tensor_model_parallel_size", "rollout.num_replicas", *DEVICE_KEYS)
    def replicas_fit(self, at: Place) -> Iterator[str]:
        nodes, per_node = self.trainer.nnodes, self.trainer.n_gpus_per_node
        room = ReplicaRoom(nodes, per_node, self.rollout.tensor_model_parallel_size)
        yield from replica_violations(self.rollout, "rollout", room, "trainer")


@dataclass
class EvalConfig:
    """Configuration of `scalerl eval`."""

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: RewardManagerConfig = field(default_factory=RewardManagerConfig)
    trainer: UserFilesConfig = field(default_factory=UserFilesConfig)


Kind = Literal["ppo", "sft", "generation", "eval", "launch"]
SCHEMAS: dict[str, type] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "generation": GenerationConfig,
    "eval": EvalConfig,
    "launch": LaunchConfig,
}
