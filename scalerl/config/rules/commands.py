"""The rules of each command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalerl.config.rules.algorithm import ALGORITHM_RULES
from scalerl.config.rules.base import Rule, rule
from scalerl.config.rules.batch import PPO_BATCH_RULES, SFT_BATCH_RULES
from scalerl.config.rules.correction import CORRECTION_RULES
from scalerl.config.rules.judge import JUDGE_RULES
from scalerl.config.rules.layout import flash_attention_rule, trained_layout_rule, transformer_engine_rules
from scalerl.config.rules.megatron import megatron_rules
from scalerl.config.rules.names import NAME_RULES
from scalerl.config.rules.optimizer import optimizer_rules
from scalerl.config.rules.reward import REWARD_RULES
from scalerl.config.rules.roles import ROLE_RULES
from scalerl.config.rules.rollout import ROLLOUT_RULES, ROLLOUT_RULES_ON_CUDA
from scalerl.config.rules.sampling import SAMPLING_RULES
from scalerl.config.rules.trainer import TRAINER_RULES, TRAINER_RULES_ON_CPU
from scalerl.config.schema import PPOConfig, SFTConfig
from scalerl.config.sections import ACTOR


@rule("trainer.test_freq", "trainer.best_ckpt_to_keep", "data.val_files")
def _sft_validation(cfg: SFTConfig) -> Iterator[str]:
    # What the best checkpoints lack is said together.
    if cfg.trainer.test_freq > 0 and not cfg.trainer.best_ckpt_to_keep and cfg.data.val_files is None:
        yield (
            f"trainer.test_freq = {cfg.trainer.test_freq}: there is nothing to validate on while data.val_files = "
            "null; set data.val_files=FILE, or trainer.test_freq=-1"
        )


PPO_RULES: list[Rule] = [
    trained_layout_rule(f"{ACTOR}.megatron"),
    flash_attention_rule(f"{ACTOR}.megatron"),
    *ROLLOUT_RULES,
    *PPO_BATCH_RULES,
    *optimizer_rules(f"{ACTOR}.optim"),
    *megatron_rules(f"{ACTOR}.megatron"),
    *ALGORITHM_RULES,
    *ROLE_RULES,
    *JUDGE_RULES,
    *REWARD_RULES,
    *CORRECTION_RULES,
    *SAMPLING_RULES,
    *TRAINER_RULES,
    *NAME_RULES,
]

SFT_RULES: list[Rule] = [
    trained_layout_rule("megatron"),
    flash_attention_rule("megatron"),
    *SFT_BATCH_RULES,
    _sft_validation,
    *optimizer_rules("optim"),
    *megatron_rules("megatron"),
    *TRAINER_RULES,
]


def device_rules(cfg: Any, device: str | None) -> list[Rule]:
    """The rules that depend on the device.  device: cuda or cpu; None while only trainer.device is known."""
    if not isinstance(cfg, PPOConfig | SFTConfig):
        return []
    rules: list[Rule] = []
    # What is installed counts on the machine that has the devices, which knows them.
    if device is not None or cfg.trainer.device == "cpu":
        rules += transformer_engine_rules(cfg, device or cfg.trainer.device)
    if (device or cfg.trainer.device) == "cpu":
        rules += TRAINER_RULES_ON_CPU
    if isinstance(cfg, PPOConfig) and (device or cfg.trainer.device) == "cuda":
        rules += ROLLOUT_RULES_ON_CUDA
    return rules
