"""Checks of configuration, data, models and rewards before a device is held; all errors are reported together."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from scalerl.base.extras import extra
from scalerl.base.user_code import import_files
from scalerl.checkpoint.mirror import Mirror
from scalerl.cluster.device import resolve_device
from scalerl.cluster.probes.gpu import start_violations
from scalerl.cluster.ray_start import one_machine_violations
from scalerl.config import (
    PPOConfig,
    SFTConfig,
    decay_to_the_end,
    model_roles,
    too_few_conversations,
    too_few_prompts,
    uses_critic,
    validate_ppo,
    validate_sft,
    world_size,
)
from scalerl.config.errors import ErrorCollector
from scalerl.config.partial_config import OVERRIDES
from scalerl.config.schema import (
    DataConfig,
    JudgeConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SFTDataConfig,
)
from scalerl.config.schema.trainer import BEST_METRIC
from scalerl.config.servers import traits_of
from scalerl.data.model_source import fetch_models, model_directory
from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.tracking import check_backends
from scalerl.tracking.backend import safe_uri
from scalerl.trainer.checks.attention_choice import AttentionChoice, called_head_sizes, choose_attention
from scalerl.trainer.checks.model_checks import (
    actor_violations,
    check_same_tokenizer,
    judge_violations,
    model_layout_violations,
    read_model,
    read_role,
    role_violations,
    tokenizer_violations,
)
from scalerl.trainer.console_texts import run_directory_violation
from scalerl.trainer.custom_fit import Fit, load_fit
from scalerl.trainer.saving import checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset, SFTDataset
    from scalerl.rewards import RewardManager

log = logging.getLogger(__name__)


class PlannedMemory(Protocol):
    """What the memory plan says of a run: its summary as text, and a violation if the run does not fit its devices."""

    @property
    def summary(self) -> str: ...
    @property
    def violations(self) -> list[str]: ...


# (configuration, role -> shape, cuda or cpu) -> the plan.
PlanMemory = Callable[[PPOConfig | SFTConfig, Mapping[str, ModelShape], str], PlannedMemory]


@dataclass(frozen=True)
class PPOInputs:
    """The checked inputs of an RL run. device: cuda or cpu."""

    # Role -> the shape of its model.
    shapes: dict[str, ModelShape]
    tokenizer: PreTrainedTokenizerBase
    train: RLHFDataset | PromptTable
    val: RLHFDataset | PromptTable
    device: str
    resumed: checkpoints.Resumed
    # trainer.custom_fit.
    fit: Fit | None = None
    memory: PlannedMemory | None = None
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    # The text of data.chat_template_path; None: the model's own.
    chat_template: str | None = None


@dataclass(frozen=True)
class SFTInputs:
    """The checked inputs of a fine-tuning run. device: cuda or cpu."""

    shape: ModelShape
    train: SFTDataset
    val: SFTDataset | None
    device: str
    resumed: checkpoints.Resumed
    memory: PlannedMemory | None = None
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    # The text of data.chat_template_path; None: the model's own.
    chat_template: str | None = None


def check_ppo(cfg: PPOConfig, device: str | None = None, *, digests: bool = True) -> PPOInputs:
    """Checks the configuration, files and models of an RL run; raises ConfigError with every violation.

    device: cuda or cpu, of the machines that will run it; None: the device of trainer.device on this machine.
    digests: compare the digests of the checkpoint to resume from; False: only its files and their sizes.
    """
    from scalerl.algorithms import get_adv_estimator, get_policy_loss
    from scalerl.data import create_rl_dataset
    from scalerl.rewards import build_reward_manager
    from scalerl.rollout.program import load_program
    from scalerl.trainer.checks.user_code_checks import own_code_violations

    errors = ErrorCollector()
    serves = traits_of(cfg.actor_rollout_ref.rollout.name).compiles_kernels
    runs_here = device is None
    device = device or _this_machine(errors, cfg, serves=serves)
    fetch_models(cfg, errors.attempt)
    # First: the rules that hold, and the models of the run, depend on what these files register.
    imported = _import_own(errors, cfg.trainer)
    fit = errors.attempt(lambda: load_fit(cfg.trainer.custom_fit))
    program = errors.attempt(lambda: load_program(cfg.actor_rollout_ref.rollout.program))
    rewards = estimator = None
    # Without these files, registered names would be reported as unknown.
    if imported:
        estimator = errors.attempt(lambda: get_adv_estimator(cfg.algorithm.adv_estimator))
        errors.attempt(lambda: get_policy_loss(cfg.actor_rollout_ref.actor.policy_loss.loss_mode))
        rewards = errors.attempt(lambda: build_reward_manager(cfg.reward_model, cfg.custom_reward_function))
    broken = validate_ppo(cfg, device=device)
    errors.violations.extend(broken)
    _check_overrides(errors, _sections_of_megatron(cfg), device if runs_here else None)
    model = cfg.actor_rollout_ref.model
    tokenizer = errors.attempt(
        lambda: _policy_tokenizer(model, "actor_rollout_ref.model.path", cfg.data.chat_template_path)
    )
    # Models and data are not compared with sizes that contradict each other.
    shapes = _check_models(errors, cfg, tokenizer, None if broken else device)
    attention = choose_attention(errors, cfg.trainer, called_head_sizes(cfg, shapes), device, runs_here=runs_here)
    memory = _check_memory(errors, cfg, shapes, device)
    _check_judge(errors, cfg.reward_model.judge)
    train = val = None
    if tokenizer is not None:
        train = errors.attempt(
            lambda: create_rl_dataset(cfg.data.train_files, tokenizer, cfg.data, cfg.data.train_max_samples)
        )
        val = errors.attempt(
            lambda: create_rl_dataset(cfg.data.val_files, tokenizer, cfg.data, cfg.data.val_max_samples)
        )
    if train is not None and val is not None:
        errors.violations.extend(_scorers_without_prompts(cfg, train, val))
    if train is not None and not broken and not cfg.trainer.val_only:
        errors.violations.extend(too_few_prompts(cfg, len(train)))
        errors.violations.extend(decay_to_the_end(cfg, len(train)))
    if not (tokenizer is None or train is None or program is None or estimator is None or broken):
        errors.violations.extend(own_code_violations(cfg, program, estimator, train, tokenizer))
    if rewards is not None:
        datasets = {name: dataset for name, dataset in (("train", train), ("val", val)) if dataset is not None}
        _try_rewards(errors, rewards, cfg, datasets, tokenizer)
    trained = {role: (path, shapes.get(role)) for role, path in trained_models(cfg).items()}
    remote = model.trust_remote_code
    resumed = _check_resume(
        errors, cfg.trainer, cfg.data, trained, train, tokenizer, trust_remote_code=remote, digests=digests
    )
    errors.raise_if_any()
    assert tokenizer is not None and train is not None and val is not None and resumed is not None
    template = _own_template(tokenizer, cfg.data.chat_template_path)
    return PPOInputs(shapes, tokenizer, train, val, device, resumed, fit, memory, attention, template)


def _this_machine(errors: ErrorCollector, cfg: PPOConfig | SFTConfig, *, serves: bool) -> str:
    """The device of trainer.device on this machine; adds errors that would end a run on it at its start."""
    device = errors.attempt(lambda: resolve_device(cfg.trainer.device)) or "cpu"
    errors.violations.extend(one_machine_violations(cfg))
    errors.violations.extend(start_violations(device, serves=serves))
    return device


def _policy_tokenizer(model: ModelConfig, key: str, template_path: str | None) -> PreTrainedTokenizerBase:
    """Loads the policy's tokenizer, with the chat template of data.chat_template_path."""
    from scalerl.data import load_tokenizer
    from scalerl.data.chat import use_chat_template

    tokenizer = load_tokenizer(model_directory(model.path, key), model.trust_remote_code)
    use_chat_template(tokenizer, template_path)
    return tokenizer


def _own_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> str | None:
    """The text by which the rows became tokens, whatever is in the file later; None where it is the model's."""
    template = tokenizer.chat_template if path is not None else None
    assert template is None or isinstance(template, str), "use_chat_template sets a text"
    return template


def _scorers_without_prompts(cfg: PPOConfig, *datasets: RLHFDataset | PromptTable) -> Iterator[str]:
    scorers = {"model": ("reward_model", cfg.reward_model.enable)}
    scorers["judge"] = ("reward_model.judge", cfg.reward_model.judge.enable)
    wanted = {style: section for style, (section, is_enabled) in scorers.items() if is_enabled}
    if not wanted:
        return
    styles = {dataset[uid].reward_style for dataset in datasets for uid in range(len(dataset))}
    for style, section in wanted.items():
        if style not in styles:
            yield (
                f"{section}.enable = true: no prompt of data.train_files and data.val_files has reward_model.style "
                f"{style!r}, so it would score nothing (their styles: {', '.join(sorted(styles))}); set "
                f"{section}.enable=false, or the style of the prompts that it is for"
            )


def _try_rewards(
    errors: ErrorCollector,
    rewards: RewardManager,
    cfg: PPOConfig,
    datasets: dict[str, RLHFDataset | PromptTable],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Scores a row of each data source and adds the failures to the errors. Closes the manager."""
    from scalerl.trainer.checks.reward_checks import reward_violations

    try:
        if tokenizer is not None:
            errors.violations.extend(reward_violations(rewards, cfg, datasets, tokenizer))
    finally:
        rewards.close()


def trained_models(cfg: PPOConfig) -> dict[str, str]:
    """The path of the model that each trained role starts from, by role."""
    critic = {"critic": cfg.critic.model.path} if uses_critic(cfg) else {}
    return {"actor": cfg.actor_rollout_ref.model.path} | critic


def _check_models(
    errors: ErrorCollector, cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase | None, device: str | None
) -> dict[str, ModelShape]:
    """Reads the shape of each role's model, with the head of the role; models that cannot be read are left out.

    device: None: the models are read, but not checked against the configuration.
    """
    shapes = {
        "actor": errors.attempt(lambda: read_model(cfg.actor_rollout_ref.model.path, "actor_rollout_ref.model.path"))
    }
    if shapes["actor"] is not None:
        if device is not None:
            errors.violations.extend(actor_violations(cfg, shapes["actor"], device=device))
        if tokenizer is not None:
            key, path = "actor_rollout_ref.model.path", cfg.actor_rollout_ref.model.path
            options = cfg.data.chat_template_kwargs
            errors.violations.extend(tokenizer_violations(key, path, shapes["actor"], tokenizer, options))
    for role in model_roles(cfg):
        # The policy's model has been read already; if that failed, the error is not repeated.
        is_said = shapes["actor"] is None and role.model_path == cfg.actor_rollout_ref.model.path
        if role.model_path is None or is_said:
            continue
        shape = shapes[role.name] = errors.attempt(partial(read_role, role))
        if shape is not None and device is not None:
            errors.violations.extend(role_violations(cfg, role, shape, tokenizer))
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _check_memory(
    errors: ErrorCollector, cfg: PPOConfig | SFTConfig, shapes: Mapping[str, ModelShape], device: str
) -> PlannedMemory | None:
    """Plans the memory of a run that has no other error, and adds an error if it does not fit its devices.

    On GPUs, sets the KV cache of every replica of the policy as planned.
    """
    wanted = 1 + (len(model_roles(cfg)) if isinstance(cfg, PPOConfig) else 0)
    if errors.violations or len(shapes) < wanted:
        return None
    plan_memory: PlanMemory | None = extra("plan_memory")
    planned = None if plan_memory is None else errors.attempt(lambda: plan_memory(cfg, shapes, device))
    if planned is not None:
        errors.violations.extend(planned.violations)
    return planned


def _check_judge(errors: ErrorCollector, judge: JudgeConfig) -> None:
    from scalerl.data import load_tokenizer
    from scalerl.data.chat import require_chat_template
    from scalerl.rewards.judge import load_question

    if not judge.enable:
        return
    errors.attempt(lambda: load_question(judge.prompt_path))
    path = judge.model.path
    if path is not None:
        errors.violations.extend(judge_violations(judge))
        tokenizer = errors.attempt(lambda: load_tokenizer(path, judge.model.trust_remote_code))
        if tokenizer is not None:
            errors.attempt(lambda: require_chat_template(tokenizer))


def check_sft(cfg: SFTConfig, device: str | None = None, *, digests: bool = True) -> SFTInputs:
    """Checks the configuration, files and models of a fine-tuning run, as `check_ppo` does."""
    from scalerl.data import SFTDataset

    errors = ErrorCollector()
    runs_here = device is None
    device = device or _this_machine(errors, cfg, serves=False)
    fetch_models(cfg, errors.attempt)
    _import_own(errors, cfg.trainer)
    broken = validate_sft(cfg, device=device)
    errors.violations.extend(broken)
    metric, known = cfg.trainer.best_ckpt_metric, BEST_METRIC["sft"]
    if metric is not None and not checkpoints.matching(metric, [known]):
        errors.violations.append(
            f"trainer.best_ckpt_metric = {metric}: no metric of a validation of fine-tuning; set it to {known}"
        )
    _check_overrides(errors, {"megatron": cfg.megatron, "optim": cfg.optim}, device if runs_here else None)
    shape = errors.attempt(lambda: read_model(cfg.model.path, "model.path"))
    if shape and not broken:
        errors.violations.extend(
            model_layout_violations(shape, cfg.megatron, world_size(cfg), prefix="megatron", rollout_tp=None)
        )
    shapes = {} if shape is None else {"actor": shape}
    attention = choose_attention(errors, cfg.trainer, called_head_sizes(cfg, shapes), device, runs_here=runs_here)
    memory = _check_memory(errors, cfg, shapes, device)
    tokenizer = errors.attempt(lambda: _policy_tokenizer(cfg.model, "model.path", cfg.data.chat_template_path))
    if shape is not None and tokenizer is not None:
        options = cfg.data.chat_template_kwargs
        errors.violations.extend(tokenizer_violations("model.path", cfg.model.path, shape, tokenizer, options))
    train = val = None
    if tokenizer is not None:
        train = errors.attempt(lambda: SFTDataset(cfg.data.train_files, tokenizer, cfg.data))
        if cfg.data.val_files:
            val = errors.attempt(lambda: SFTDataset(cfg.data.val_files, tokenizer, cfg.data))
    if train is not None and not broken:
        errors.violations.extend(too_few_conversations(cfg, len(train)))
        errors.violations.extend(decay_to_the_end(cfg, len(train)))
    models = {"actor": (cfg.model.path, shape)}
    remote = cfg.model.trust_remote_code
    resumed = _check_resume(
        errors, cfg.trainer, cfg.data, models, train, tokenizer, trust_remote_code=remote, digests=digests
    )
    errors.raise_if_any()
    assert shape is not None and tokenizer is not None and train is not None and resumed is not None
    template = _own_template(tokenizer, cfg.data.chat_template_path)
    return SFTInputs(shape, train, val, device, resumed, memory, attention, template)


def find_resume_point_again(
    cfg: PPOConfig | SFTConfig,
    inputs: PPOInputs | SFTInputs,
    passed_over: Mapping[Path, str],
    *,
    fetches: bool = True,
) -> checkpoints.Resumed:
    """The checkpoint that a run resumes from instead of those that its ranks could not load, checked like the first.

    passed_over: their directories, and why.  fetches: a newer one of trainer.checkpoint_mirror is fetched, for which
    no other run may write to the directory.  Raises ConfigError.
    """
    errors = ErrorCollector()
    models: Mapping[str, tuple[str, ModelShape | None]]
    if isinstance(cfg, PPOConfig):
        assert isinstance(inputs, PPOInputs)
        model, tokenizer = cfg.actor_rollout_ref.model, inputs.tokenizer
        models = {role: (path, inputs.shapes[role]) for role, path in trained_models(cfg).items()}
    else:
        assert isinstance(inputs, SFTInputs)
        model = cfg.model
        models = {"actor": (model.path, inputs.shape)}
        tokenizer = errors.attempt(lambda: _policy_tokenizer(cfg.model, "model.path", cfg.data.chat_template_path))
    resumed = _check_resume(
        errors,
        cfg.trainer,
        cfg.data,
        models,
        inputs.train,
        tokenizer,
        trust_remote_code=model.trust_remote_code,
        digests=True,
        fetches=fetches,
        passed_over=passed_over,
    )
    errors.raise_if_any()
    assert resumed is not None
    return resumed


def _sections_of_megatron(cfg: PPOConfig) -> dict[str, MegatronConfig | OptimConfig]:
    """The megatron and optim sections of the run's models, by key; sections equal to the actor's are left out."""
    actor = cfg.actor_rollout_ref.actor
    others: dict[str, MegatronConfig | OptimConfig] = {
        f"{role.section}.megatron": role.megatron for role in model_roles(cfg) if role.megatron != actor.megatron
    }
    if uses_critic(cfg):
        others["critic.optim"] = cfg.critic.optim
    return {"actor_rollout_ref.actor.megatron": actor.megatron, "actor_rollout_ref.actor.optim": actor.optim} | others


def fields_of_megatron_violations(cfg: PPOConfig | SFTConfig) -> list[str]:
    """What is wrong with the fields of Megatron's configs that the user set, on any machine."""
    errors = ErrorCollector()
    own = {"megatron": cfg.megatron, "optim": cfg.optim} if isinstance(cfg, SFTConfig) else _sections_of_megatron(cfg)
    _check_overrides(errors, own, device=None)
    return errors.violations


def _check_overrides(
    errors: ErrorCollector, sections: Mapping[str, MegatronConfig | OptimConfig], device: str | None
) -> None:
    """Checks the fields of Megatron's configs that the user set.

    sections: by key.  device: whose kernels are asked for; None where the run is on other machines.
    """
    for section, config in sections.items():
        if any(getattr(config, name, None) for name in OVERRIDES):
            # Imported here: megatron takes seconds to import.
            from scalerl.parallel.megatron_overrides import (
                dispatcher_line,
                kernel_violations,
                override_violations,
                unfused,
            )

            errors.violations.extend(override_violations(section, config))
            if (line := dispatcher_line(section, config)) is not None:
                log.warning(line)
            if device is not None:
                errors.violations.extend(kernel_violations(section, config, device=device))
                for line in unfused(section, config, on_cpu=device == "cpu"):
                    log.warning(line)


def _import_own(errors: ErrorCollector, trainer: RunConfig) -> bool:
    """Imports the user's files and, if that works, checks the tracking backends. Returns whether the import worked."""
    before = len(errors.violations)
    errors.attempt(lambda: import_files(trainer.import_files))
    if len(errors.violations) > before:
        return False
    errors.attempt(lambda: check_backends(trainer.logger))
    return True


def open_mirror(url: str) -> Mirror:
    """The store of trainer.checkpoint_mirror. Raises UserError, naming the key, if it cannot be used."""
    try:
        return Mirror(url)
    except UserError as error:
        raise UserError(f"trainer.checkpoint_mirror = {safe_uri(url)}: {error}") from error


def _found_before_a_fetch(find: Callable[[], checkpoints.Resumed]) -> checkpoints.Resumed:
    """What `find` returns; a fresh start where all that is there is damaged, for which there may be copies elsewhere.

    What is damaged is said by the look that fetches.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return find()
        except ValueError:
            return checkpoints.Resumed(None, {})


def _check_resume(
    errors: ErrorCollector,
    trainer: RunConfig,
    data: DataConfig | SFTDataConfig,
    models: Mapping[str, tuple[str, ModelShape | None]],
    train: RLHFDataset | PromptTable | SFTDataset | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    trust_remote_code: bool,
    digests: bool,
    fetches: bool = False,
    passed_over: Mapping[Path, str] | None = None,
) -> checkpoints.Resumed | None:
    """Finds the checkpoint to resume from, and checks that it has the models, tokenizer and prompts of the run.

    models: role -> (path, shape).  passed_over: as `find_resume_point`.
    fetches: a newer one of trainer.checkpoint_mirror is fetched; else it is only looked whether that answers, since
    another run may be writing to the directory: whoever has it for its own looks again.
    """
    from scalerl.data import PromptCursor

    if (violation := run_directory_violation(trainer.default_local_dir)) is not None:
        errors.violations.append(violation)
        return None
    mirror = trainer.checkpoint_mirror
    if mirror is not None and errors.attempt(lambda: open_mirror(mirror)) is None:
        return None
    find = partial(
        checkpoints.find_resume_point,
        trainer.default_local_dir,
        trainer.resume_mode,
        trainer.resume_from_path,
        digests=digests,
        mirror=mirror if fetches else None,
        passed_over=passed_over,
    )
    is_asked_later = mirror is not None and trainer.resume_mode == "auto" and digests and not fetches
    resumed = _found_before_a_fetch(find) if is_asked_later else errors.attempt(find)
    if resumed is None or resumed.directory is None:
        return resumed
    for role, (path, shape) in models.items():
        if shape is not None:
            errors.attempt(partial(checkpoints.check_same_model, resumed, shape, path, role))
    if tokenizer is not None:
        path = models["actor"][0]
        errors.attempt(lambda: check_same_tokenizer(resumed, tokenizer, path, trust_remote_code=trust_remote_code))
    if train is not None:
        cursor = PromptCursor(len(train), data.seed, data.shuffle, train.digest)
        errors.attempt(lambda: cursor.load_state_dict(resumed.state["prompts"]))
    return resumed
