"""Configuration: `compose` turns overrides into a checked dataclass; `schema` holds every key and default."""

from __future__ import annotations

from scalerl.config.batch_summary import batch_table
from scalerl.config.compose import Composed, compose, composed, violations_of
from scalerl.config.errors import ConfigError
from scalerl.config.flags import asked_text, jobs_of, refuse_same_output, run_jobs
from scalerl.config.foreign_keys import translation_table
from scalerl.config.help import help_text
from scalerl.config.layout import LayoutSizes, alignment
from scalerl.config.layout_checks import ModelSizes, layout_violations, recompute_violations, server_violations
from scalerl.config.pools import Pool, num_devices, pools_of, trained_layout, world_size
from scalerl.config.roles import ModelRole, model_roles, refers_to_actor, uses_critic, uses_reference
from scalerl.config.run_length import decay_to_the_end, too_few_conversations, too_few_prompts, total_steps
from scalerl.config.save import flatten, save_resolved
from scalerl.config.schema import EvalConfig, GenerationConfig, PPOConfig, SFTConfig
from scalerl.config.servers import sends_adapter, transport_of

__all__ = [
    "Composed",
    "ConfigError",
    "EvalConfig",
    "GenerationConfig",
    "LayoutSizes",
    "ModelRole",
    "ModelSizes",
    "PPOConfig",
    "Pool",
    "SFTConfig",
    "alignment",
    "asked_text",
    "batch_table",
    "compose",
    "composed",
    "decay_to_the_end",
    "flatten",
    "help_text",
    "jobs_of",
    "layout_violations",
    "model_roles",
    "num_devices",
    "pools_of",
    "recompute_violations",
    "refers_to_actor",
    "refuse_same_output",
    "run_jobs",
    "save_resolved",
    "sends_adapter",
    "server_violations",
    "too_few_conversations",
    "too_few_prompts",
    "total_steps",
    "trained_layout",
    "translation_table",
    "transport_of",
    "uses_critic",
    "uses_reference",
    "violations_of",
    "world_size",
]
