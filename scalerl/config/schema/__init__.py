"""Declares each configuration key of scalerl once, with default and domain; rules between keys are in `config.rules`.

A module holds the sections that belong together, and `commands` puts them together. Key names are those of verl where
verl has the concept; a size says its unit in the comment above it.

A section that extends another one has the other's keys. A key that is declared again keeps its domain unless
`key(...)` gives another; `Other.name` as default is the other section's, and such a line only changes the comment.
"""

from __future__ import annotations

from scalerl.config.schema.actor import (
    LOSS_AGG_MODES,
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    PolicyLossConfig,
    RefConfig,
)
from scalerl.config.schema.algorithm import (
    IS_LEVELS,
    RS_OPTIONS,
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
)
from scalerl.config.schema.commands import (
    SCHEMAS,
    ActorRolloutRefConfig,
    EvalConfig,
    GenerationConfig,
    Kind,
    PPOConfig,
    SFTConfig,
)
from scalerl.config.schema.data import (
    CustomClassConfig,
    DataConfig,
    EvalDataConfig,
    GenerationDataConfig,
    SFTDataConfig,
)
from scalerl.config.schema.devices import JudgePoolConfig, ResourcePoolConfig, RolloutPoolConfig
from scalerl.config.schema.fields import domain_violations, domains_of, key, same_as
from scalerl.config.schema.launch import LaunchConfig, SlurmConfig
from scalerl.config.schema.model import MegatronConfig, ModelConfig, OptimConfig
from scalerl.config.schema.reward import (
    CustomRewardFunctionConfig,
    EvalRewardConfig,
    JudgeConfig,
    JudgeModelConfig,
    OverlongBufferConfig,
    RewardModelConfig,
    ScoringModelConfig,
)
from scalerl.config.schema.rollout import (
    GenerationRolloutConfig,
    ProgramConfig,
    RolloutConfig,
    ServerConfig,
    ValSamplingConfig,
)
from scalerl.config.schema.trainer import (
    FLASH_ATTENTION_IMPLS,
    LOGGERS,
    CustomFitConfig,
    EvalTrainerConfig,
    GenerationTrainerConfig,
    RunConfig,
    SFTTrainerConfig,
    TrainerConfig,
)

__all__ = [
    "FLASH_ATTENTION_IMPLS",
    "IS_LEVELS",
    "LOGGERS",
    "LOSS_AGG_MODES",
    "RS_OPTIONS",
    "SCHEMAS",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CustomClassConfig",
    "CustomFitConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "EvalConfig",
    "EvalDataConfig",
    "EvalRewardConfig",
    "EvalTrainerConfig",
    "FilterGroupsConfig",
    "GenerationConfig",
    "GenerationDataConfig",
    "GenerationRolloutConfig",
    "GenerationTrainerConfig",
    "JudgeConfig",
    "JudgeModelConfig",
    "JudgePoolConfig",
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
    "RolloutPoolConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "ScoringModelConfig",
    "ServerConfig",
    "SlurmConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "domain_violations",
    "domains_of",
    "key",
    "same_as",
]
