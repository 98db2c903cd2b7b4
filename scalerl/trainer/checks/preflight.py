"""The checks of a run in their order, before a device is held; all errors are reported together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.config import (
    PPOConfig,
    SFTConfig,
    decay_to_the_end,
    too_few_conversations,
    too_few_prompts,
    violations_of,
)
from scalerl.config.errors import ErrorCollector
from scalerl.config.schema.trainer import BEST_METRIC
from scalerl.data.model_source import fetch_models
from scalerl.models import ModelShape
from scalerl.trainer.checks.machine import (
    AttentionChoice,
    PlannedMemory,
    called_head_sizes,
    check_machine,
    check_memory,
    choose_attention,
)
from scalerl.trainer.checks.models import (
    check_judge,
    check_megatron_fields,
    check_models,
    check_processor,
    check_reference_server,
    check_tokenizer,
    warn_of_idle_towers,
)
from scalerl.trainer.checks.resume import check_resume
from scalerl.trainer.custom_fit import Fit
from scalerl.trainer.saving.checkpoints import Resumed, matching

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset, SFTDataset
    from scalerl.data.pictures import PictureProcessor


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of a run.

    shapes: of the models, by role.  device: cuda or cpu.
    chat_template: the text of data.chat_template_path; None: the model's own.
    processor: of the pictures of the policy; None: it takes none.
    """

    shapes: dict[str, ModelShape]
    tokenizer: PreTrainedTokenizerBase
    device: str
    resumed: Resumed
    memory: PlannedMemory | None = None
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    chat_template: str | None = None
    processor: PictureProcessor | None = None


@dataclass(frozen=True, kw_only=True)
class PPOInputs(Inputs):
    """The checked inputs of an RL run.  fit: trainer.custom_fit."""

    train: RLHFDataset | PromptTable
    val: RLHFDataset | PromptTable
    fit: Fit | None = None


@dataclass(frozen=True, kw_only=True)
class SFTInputs(Inputs):
    """The checked inputs of a fine-tuning run."""

    train: SFTDataset
    val: SFTDataset | None


def check_ppo(cfg: PPOConfig, device: str | None = None, *, digests: bool = True) -> PPOInputs:
    """Checks the configuration, files and models of an RL run; raises ConfigError with every violation.

    device: cuda or cpu, of the machines that will run it; None: the device of trainer.device on this machine.
    digests: compare the digests of the checkpoint to resume from; False: only its files and their sizes.
    """
    from scalerl.data import create_rl_dataset
    from scalerl.rollout.program import single_turn
    from scalerl.trainer.checks.user_code import load_code, try_code, with_tools

    errors, runs_here = ErrorCollector(), device is None
    device = device or check_machine(errors, cfg)
    fetch_models(cfg, errors.attempt)
    # Before the rules, which depend on the names that the user's files register.
    code = load_code(errors, cfg)
    data = with_tools(cfg, code)
    broken = violations_of(cfg, device=device)
    errors.violations.extend(broken)
    check_megatron_fields(errors, cfg, device if runs_here else None)
    tokenizer = check_tokenizer(errors, cfg)
    # Models and data are not compared with sizes that contradict each other.
    shapes = check_models(errors, cfg, tokenizer, None if broken else device)
    attention = choose_attention(errors, cfg.trainer, called_head_sizes(cfg, shapes), device, runs_here=runs_here)
    memory = check_memory(errors, cfg, shapes, device)
    check_judge(errors, cfg.reward_model.judge)
    if runs_here:
        check_reference_server(errors, cfg, tokenizer)
    train = val = None
    processor = check_processor(errors, cfg)
    if tokenizer is not None:
        train, val = (
            errors.attempt(partial(create_rl_dataset, files, tokenizer, data, max_samples, processor))
            for files, max_samples in (
                (data.train_files, data.train_max_samples),
                (data.val_files, data.val_max_samples),
            )
        )
    if train is not None and val is not None:
        errors.violations.extend(_scorers_without_prompts(cfg, train, val))
    if train is not None and not broken and not cfg.trainer.val_only:
        errors.violations.extend(too_few_prompts(cfg, len(train)))
        errors.violations.extend(decay_to_the_end(cfg, len(train)))
        # A program may show images that no row has.
        if code.program is single_turn:
            warn_of_idle_towers(cfg, shapes, train)
    datasets = {name: dataset for name, dataset in (("train", train), ("val", val)) if dataset is not None}
    try_code(errors, cfg, code, datasets, tokenizer, processor, sizes_agree=not broken)
    resumed = check_resume(errors, cfg, shapes, train, tokenizer, digests=digests)
    errors.raise_if_any()
    assert tokenizer is not None and train is not None and val is not None and resumed is not None
    return PPOInputs(
        shapes=shapes,
        tokenizer=tokenizer,
        train=train,
        val=val,
        device=device,
        resumed=resumed,
        fit=code.fit,
        memory=memory,
        attention=attention,
        chat_template=_own_template(tokenizer, cfg),
        processor=processor,
    )


def check_sft(cfg: SFTConfig, device: str | None = None, *, digests: bool = True) -> SFTInputs:
    """Checks the configuration, files and models of a fine-tuning run, as `check_ppo` does."""
    from scalerl.data import SFTDataset
    from scalerl.trainer.checks.user_code import import_user_files

    errors, data, runs_here = ErrorCollector(), cfg.data, device is None
    device = device or check_machine(errors, cfg)
    fetch_models(cfg, errors.attempt)
    import_user_files(errors, cfg.trainer)
    broken = violations_of(cfg, device=device)
    errors.violations.extend(broken)
    errors.violations.extend(_best_metric_violations(cfg))
    check_megatron_fields(errors, cfg, device if runs_here else None)
    tokenizer = check_tokenizer(errors, cfg)
    shapes = check_models(errors, cfg, tokenizer, None if broken else device)
    attention = choose_attention(errors, cfg.trainer, called_head_sizes(cfg, shapes), device, runs_here=runs_here)
    memory = check_memory(errors, cfg, shapes, device)
    train = val = None
    processor = check_processor(errors, cfg)
    if tokenizer is not None:
        train = errors.attempt(lambda: SFTDataset(data.train_files, tokenizer, data, processor))
        if data.val_files:
            val = errors.attempt(lambda: SFTDataset(data.val_files, tokenizer, data, processor))
    if train is not None and not broken:
        errors.violations.extend(too_few_conversations(cfg, len(train)))
        errors.violations.extend(decay_to_the_end(cfg, len(train)))
        warn_of_idle_towers(cfg, shapes, train)
    resumed = check_resume(errors, cfg, shapes, train, tokenizer, digests=digests)
    errors.raise_if_any()
    assert tokenizer is not None and train is not None and resumed is not None
    return SFTInputs(
        shapes=shapes,
        tokenizer=tokenizer,
        train=train,
        val=val,
        device=device,
        resumed=resumed,
        memory=memory,
        attention=attention,
        chat_template=_own_template(tokenizer, cfg),
        processor=processor,
    )


def find_resume_point_again(
    cfg: PPOConfig | SFTConfig,
    inputs: PPOInputs | SFTInputs,
    passed_over: Mapping[Path, str],
    *,
    fetches: bool = True,
) -> Resumed:
    """The checkpoint that a run resumes from instead of those that its ranks could not load, checked like the first.

    passed_over: their directories, and why.  fetches: a newer one of trainer.checkpoint_mirror is fetched, for which
    no other run may write to the directory.  Raises ConfigError.
    """
    errors = ErrorCollector()
    resumed = check_resume(
        errors,
        cfg,
        inputs.shapes,
        inputs.train,
        inputs.tokenizer,
        digests=True,
        fetches=fetches,
        passed_over=passed_over,
    )
    errors.raise_if_any()
    assert resumed is not None
    return resumed


def _own_template(tokenizer: PreTrainedTokenizerBase, cfg: PPOConfig | SFTConfig) -> str | None:
    """The text by which the rows became tokens, also if its file changes later; None where it is the model's."""
    template = tokenizer.chat_template if cfg.data.chat_template_path is not None else None
    assert template is None or isinstance(template, str), "use_chat_template sets a text"
    return template


def _best_metric_violations(cfg: SFTConfig) -> Iterator[str]:
    metric, known = cfg.trainer.best_ckpt_metric, BEST_METRIC["sft"]
    if metric is not None and not matching(metric, [known]):
        yield f"trainer.best_ckpt_metric = {metric}: no metric of a validation of fine-tuning; set it to {known}"


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
