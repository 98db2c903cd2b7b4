"""Declares each configuration key of scalerl once: default, domain, meaning, and the checks between keys.

A module holds the sections that belong together, and `commands` puts them together. Key names are those of verl where
verl has the concept; a size has its unit in the comment above it. A relation between keys is a `@check` method of their
section, or of the root where it is between sections.

A section that extends another one has the other's keys. A key that is declared again keeps its domain unless
`key(...)` gives another; `Other.name` as default is the other section's, and such a line only changes the comment.
"""

from __future__ import annotations

from scalerl.config.names import FLASH_ATTENTION_IMPLS
from scalerl.config.schema.actor import (
    LOSS_AGG_MODES,
    ActorConfig,
    CriticConfig,
    PolicyLossConfig,
    RefConfig,
)
from scalerl.config.schema.algorithm import AlgorithmConfig, KLControlConfig, RolloutCorrectionConfig
from scalerl.config.schema.commands import SCHEMAS, EvalConfig, GenerationConfig, Kind, SFTConfig
from scalerl.config.schema.data import CustomClassConfig, DataConfig, SFTDataConfig
from scalerl.config.schema.devices import DevicesConfig, ResourcePoolConfig
from scalerl.config.schema.fields import domain_violations, domains_of
from scalerl.config.schema.launch import LaunchConfig, SlurmConfig
from scalerl.config.schema.model import AdapterKeys, MegatronConfig, ModelConfig, OptimConfig
from scalerl.config.schema.ppo import PPOConfig
from scalerl.config.schema.reward import (
    CustomRewardFunctionConfig,
    JudgeConfig,
    OverlongBufferConfig,
    RewardModelConfig,
    ScoringModelConfig,
)
from scalerl.config.schema.rollout import ProgramConfig, RolloutConfig, ServerConfig
from scalerl.config.schema.trainer import (
    LOGGERS,
    AlarmsConfig,
    CustomFitConfig,
    RunConfig,
    SFTTrainerConfig,
    TrainerConfig,
)

__all__ = [
    "FLASH_ATTENTION_IMPLS",
    "LOGGERS",
    "LOSS_AGG_MODES",
    "SCHEMAS",
    "ActorConfig",
    "AdapterKeys",
    "AlarmsConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "CustomClassConfig",
    "CustomFitConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "DevicesConfig",
    "EvalConfig",
    "GenerationConfig",
    "JudgeConfig",
    "KLControlConfig",
    "Kind",
    "LaunchConfig",
    "MegatronConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "ProgramConfig",
    "RefConfig",
    "ResourcePoolConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "ScoringModelConfig",
    "ServerConfig",
    "SlurmConfig",
    "TrainerConfig",
    "domain_violations",
    "domains_of",
]
