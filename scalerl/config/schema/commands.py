"""The configuration of each command, put together from the sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scalerl.config.schema.actor import ActorConfig, CriticConfig, RefConfig
from scalerl.config.schema.algorithm import AlgorithmConfig
from scalerl.config.schema.data import DataConfig, EvalDataConfig, GenerationDataConfig, SFTDataConfig
from scalerl.config.schema.launch import LaunchConfig
from scalerl.config.schema.model import MegatronConfig, ModelConfig, OptimConfig
from scalerl.config.schema.reward import CustomRewardFunctionConfig, EvalRewardConfig, RewardModelConfig
from scalerl.config.schema.rollout import GenerationRolloutConfig, RolloutConfig
from scalerl.config.schema.trainer import (
    EvalTrainerConfig,
    GenerationTrainerConfig,
    SFTTrainerConfig,
    TrainerConfig,
)


@dataclass
class ActorRolloutRefConfig:
    """The policy: the model, its training, its reference and its servers."""

    # True: trainer and rollout share devices. False: the servers have those of rollout.resource_pool.
    hybrid_engine: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class PPOConfig:
    """Configuration of `scalerl train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class SFTConfig:
    """Configuration of `scalerl sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


@dataclass
class GenerationConfig:
    """Configuration of `scalerl generate`."""

    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)


@dataclass
class EvalConfig:
    """Configuration of `scalerl eval`."""

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: EvalRewardConfig = field(default_factory=EvalRewardConfig)
    trainer: EvalTrainerConfig = field(default_factory=EvalTrainerConfig)


Kind = Literal["ppo", "sft", "generation", "eval", "launch"]
SCHEMAS: dict[str, type] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "generation": GenerationConfig,
    "eval": EvalConfig,
    "launch": LaunchConfig,
}
