"""Everything that can be found wrong before a device is held, found together: config, data, model, reward function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from scalerl.config import (
    ConfigError,
    ModelSizes,
    PPOConfig,
    SFTConfig,
    layout_violations,
    recompute_violations,
    validate_ppo,
    validate_sft,
    world_size,
)
from scalerl.config.schema import DataConfig, MegatronConfig, SFTDataConfig, SFTTrainerConfig, TrainerConfig
from scalerl.families import HFWeights, ModelShape, family_of
from scalerl.trainer import checkpoints
from scalerl.trainer.device import resolve_device

if TYPE_CHECKING:
    from scalerl.data import RLHFDataset, SFTDataset

Checked = TypeVar("Checked")


@dataclass(frozen=True)
class PPOInputs:
    shape: ModelShape
    train: RLHFDataset
    val: RLHFDataset
    device: str
    resumed: checkpoints.Resumed


@dataclass(frozen=True)
class SFTInputs:
    shape: ModelShape
    train: SFTDataset
    val: SFTDataset | None
    device: str
    resumed: checkpoints.Resumed


def check_ppo(cfg: PPOConfig) -> PPOInputs:
    """Raises ConfigError with every violation that was found."""
    from scalerl.algorithms import get_adv_estimator, get_policy_loss
    from scalerl.data import RLHFDataset, load_tokenizer
    from scalerl.rewards import build_reward_manager

    findings = _Findings()
    device = resolve_device(cfg.trainer.device)
    findings.violations.extend(validate_ppo(cfg, device=device))
    shape = findings.run(lambda: _check_model(cfg.actor_rollout_ref.model.path))
    if cfg.actor_rollout_ref.ref.model_path:
        findings.run(lambda: _check_model(cfg.actor_rollout_ref.ref.model_path))
    if shape:
        findings.violations.extend(
            _layout(
                shape,
                cfg.actor_rollout_ref.actor.megatron,
                world_size(cfg),
                prefix="actor_rollout_ref.actor.megatron",
                rollout_tp=cfg.actor_rollout_ref.rollout.tensor_model_parallel_size,
            )
        )
        rollout = cfg.actor_rollout_ref.rollout
        if shape.num_experts and rollout.name == "sglang" and rollout.verify_weights_every:
            findings.violations.append(
                f"actor_rollout_ref.rollout.verify_weights_every = {rollout.verify_weights_every}: the checksums of an "
                f"SGLang server are not known for a mixture of experts ({shape.model_type}); set it to 0"
            )
        longest = cfg.data.max_prompt_length + cfg.data.max_response_length
        if longest > shape.max_position_embeddings:
            findings.violations.append(
                f"data.max_prompt_length + data.max_response_length = {longest}: the model has "
                f"{shape.max_position_embeddings} positions (max_position_embeddings); shorten one"
            )
    findings.run(lambda: get_adv_estimator(cfg.algorithm.adv_estimator))
    findings.run(lambda: get_policy_loss(cfg.actor_rollout_ref.actor.policy_loss.loss_mode))
    findings.run(lambda: build_reward_manager(cfg.reward_model, cfg.custom_reward_function).close())
    model = cfg.actor_rollout_ref.model
    tokenizer = findings.run(lambda: load_tokenizer(model.path, model.trust_remote_code))
    train = val = None
    if tokenizer is not None:
        val_data = replace(cfg.data, filter_overlong_prompts=cfg.data.filter_overlong_prompts)
        train = findings.run(
            lambda: RLHFDataset(cfg.data.train_files, tokenizer, cfg.data, None, cfg.data.train_max_samples)
        )
        val = findings.run(lambda: RLHFDataset(cfg.data.val_files, tokenizer, val_data, None, cfg.data.val_max_samples))
    resumed = _check_resume(findings, cfg.trainer, cfg.data, shape, model.path, train)
    findings.raise_if_any()
    return PPOInputs(shape, train, val, device, resumed)


def check_sft(cfg: SFTConfig) -> SFTInputs:
    """Raises ConfigError with every violation that was found."""
    from scalerl.data import SFTDataset, load_tokenizer

    findings = _Findings()
    device = resolve_device(cfg.trainer.device)
    findings.violations.extend(validate_sft(cfg, device=device))
    shape = findings.run(lambda: _check_model(cfg.model.path))
    if shape:
        findings.violations.extend(_layout(shape, cfg.megatron, world_size(cfg), prefix="megatron", rollout_tp=None))
    tokenizer = findings.run(lambda: load_tokenizer(cfg.model.path, cfg.model.trust_remote_code))
    train = val = None
    if tokenizer is not None:
        train = findings.run(lambda: SFTDataset(cfg.data.train_files, tokenizer, cfg.data))
        if cfg.data.val_files:
            val = findings.run(lambda: SFTDataset(cfg.data.val_files, tokenizer, cfg.data))
    resumed = _check_resume(findings, cfg.trainer, cfg.data, shape, cfg.model.path, train)
    findings.raise_if_any()
    return SFTInputs(shape, train, val, device, resumed)


class _Findings:
    def __init__(self) -> None:
        self.violations: list[str] = []

    def run(self, check: Callable[[], Checked]) -> Checked | None:
        """The check's result, or None with its complaint noted."""
        try:
            return check()
        except (ValueError, OSError) as error:
            self.violations.append(str(error))
            return None

    def raise_if_any(self) -> None:
        if self.violations:
            raise ConfigError(list(dict.fromkeys(self.violations)))


def _check_resume(
    findings: _Findings,
    trainer: TrainerConfig | SFTTrainerConfig,
    data: DataConfig | SFTDataConfig,
    shape: ModelShape | None,
    model_path: str,
    train: RLHFDataset | SFTDataset | None,
) -> checkpoints.Resumed | None:
    """The checkpoint that the run goes on from, if it is this model's and of these prompts."""
    from scalerl.data import PromptCursor

    resumed = findings.run(
        lambda: checkpoints.find_resume_point(trainer.default_local_dir, trainer.resume_mode, trainer.resume_from_path)
    )
    if resumed is None or resumed.directory is None:
        return resumed
    if shape is not None:
        findings.run(lambda: checkpoints.check_same_model(resumed, shape, model_path))
    if train is not None:
        cursor = PromptCursor(len(train), data.seed, data.shuffle)
        findings.run(lambda: cursor.load_state_dict(resumed.state["prompts"]))
    return resumed


def _check_model(path: str) -> ModelShape:
    shape = ModelShape.from_hf(path)
    HFWeights(path).check(family_of(shape), shape)
    return shape


def _layout(
    shape: ModelShape, megatron: MegatronConfig, world: int, *, prefix: str, rollout_tp: int | None
) -> list[str]:
    sizes = ModelSizes(
        num_attention_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        num_layers=shape.num_layers,
        ffn_hidden_size=0 if shape.moe_layers and all(shape.moe_layers) else shape.ffn_hidden_size,
        num_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        shared_expert_ffn_hidden_size=shape.shared_expert_ffn_hidden_size,
        latent_attention=shape.kv_lora_rank is not None,
    )
    found = layout_violations(sizes, megatron=megatron, world_size=world, rollout_tp=rollout_tp, prefix=prefix)
    return found or recompute_violations(sizes, megatron, prefix=prefix)
