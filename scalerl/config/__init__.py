"""Configuration: `compose` turns overrides into a checked dataclass; `schema` holds every key and default."""

from __future__ import annotations

from scalerl.config.batch_table import batch_table
from scalerl.config.compose import compose
from scalerl.config.errors import ConfigError
from scalerl.config.reference import help_text
from scalerl.config.resolved import flatten, save_resolved
from scalerl.config.schema import PPOConfig, SFTConfig
from scalerl.config.validate import dp_size, layout_violations, validate_ppo, validate_sft, world_size

__all__ = [
    "ConfigError",
    "PPOConfig",
    "SFTConfig",
    "batch_table",
    "compose",
    "dp_size",
    "flatten",
    "help_text",
    "layout_violations",
    "save_resolved",
    "validate_ppo",
    "validate_sft",
    "world_size",
]
