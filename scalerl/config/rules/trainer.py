"""Rules of a `trainer` section: resuming, the checkpoints that stay, and the names of its trackers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from scalerl.config.companions import BEST_METRIC
from scalerl.config.layout_sizes import world_size
from scalerl.config.rules.base import rule
from scalerl.config.schema import FLASH_ATTENTION_IMPLS, LOGGERS, SFTConfig
from scalerl.config.sections import IMPORT_FILES
from scalerl.config.value_checks import show

# The steps between checkpoints that a message proposes.
_SAVE_FREQ = 20


@rule("trainer.resume_mode", "trainer.resume_from_path")
def _resume(cfg: Any) -> Iterator[str]:
    mode, path = cfg.trainer.resume_mode, cfg.trainer.resume_from_path
    if mode == "resume_path" and path is None:
        yield (
            "trainer.resume_from_path = null: needed when trainer.resume_mode = resume_path; set "
            f"trainer.resume_from_path={cfg.trainer.default_local_dir}/global_step_N, or trainer.resume_mode=auto"
        )
    if mode != "resume_path" and path is not None:
        yield (
            f"trainer.resume_from_path = {path}: has no effect when trainer.resume_mode = {mode}; set "
            "trainer.resume_mode=resume_path, or trainer.resume_from_path=null"
        )


@rule(
    "trainer.max_actor_ckpt_to_keep",
    "trainer.best_ckpt_to_keep",
    "trainer.best_ckpt_metric",
    "trainer.ckpt_every_to_keep",
    "trainer.test_freq",
    "trainer.save_freq",
    "data.val_files",
)
def _kept_checkpoints(cfg: Any) -> Iterator[str]:
    trainer = cfg.trainer
    best, metric, every = trainer.best_ckpt_to_keep, trainer.best_ckpt_metric, trainer.ckpt_every_to_keep
    keep, lacks = "trainer.max_actor_ckpt_to_keep", _lacks_of_best(cfg)
    if metric is not None and not best:
        yield (
            f"trainer.best_ckpt_metric = {metric}: has no effect when trainer.best_ckpt_to_keep = 0; set "
            f"{' and '.join(['trainer.best_ckpt_to_keep=1', *lacks])}, or trainer.best_ckpt_metric=null"
        )
    if best and lacks:
        yield (
            f"trainer.best_ckpt_to_keep = {best}: needs checkpoints before the last, a validation of their steps with "
            f"the metric that ranks them, and a number of others that stay; set {' and '.join(lacks)}, or "
            "trainer.best_ckpt_to_keep=0"
        )
    if every and not best and trainer.max_actor_ckpt_to_keep is None:
        yield (
            f"trainer.ckpt_every_to_keep = {every}: all checkpoints stay when {keep} = null; set {keep}=1, or how many "
            "of the newest shall stay beside them"
        )


def _lacks_of_best(cfg: Any) -> list[str]:
    """The keys that trainer.best_ckpt_to_keep lacks, each with a value that works."""
    trainer, is_sft = cfg.trainer, isinstance(cfg, SFTConfig)
    every = trainer.save_freq if trainer.save_freq > 0 else _SAVE_FREQ
    values = {
        f"trainer.save_freq={every}": trainer.save_freq > 0,
        f"trainer.test_freq={every}": trainer.test_freq > 0,
        "data.val_files=FILE": not is_sft or cfg.data.val_files is not None,
        f"trainer.best_ckpt_metric={BEST_METRIC['sft' if is_sft else 'ppo']}": trainer.best_ckpt_metric is not None,
        "trainer.max_actor_ckpt_to_keep=1": trainer.max_actor_ckpt_to_keep is not None,
    }
    return [text for text, is_given in values.items() if not is_given]


@rule("trainer.logger", IMPORT_FILES)
def _known_loggers(cfg: Any) -> Iterator[str]:
    # A name that a file of the user's own registers is known once that file is imported.
    unknown = [] if cfg.trainer.import_files else [name for name in cfg.trainer.logger if name not in LOGGERS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], LOGGERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        yield (
            f"trainer.logger = {show(cfg.trainer.logger)}: must be a list of {', '.join(LOGGERS)}, or of backends of "
            f"your own; there is no {', '.join(unknown)}{hint}; set for example trainer.logger=[console], or "
            f"{IMPORT_FILES} to the file that registers it"
        )


@rule("trainer.profile_ranks", "trainer.nnodes", "trainer.n_gpus_per_node")
def _profiled_ranks(cfg: Any) -> Iterator[str]:
    num_ranks = world_size(cfg)
    missing = [rank for rank in cfg.trainer.profile_ranks or () if rank >= num_ranks]
    if missing:
        yield (
            f"trainer.profile_ranks = {show(cfg.trainer.profile_ranks)}: the run has ranks 0 to {num_ranks - 1}, and "
            f"no {', '.join(map(str, missing))}; set for example trainer.profile_ranks=[0]"
        )


@rule("trainer.profile_steps", "trainer.total_training_steps")
def _profiled_steps(cfg: Any) -> Iterator[str]:
    steps, total = cfg.trainer.profile_steps, cfg.trainer.total_training_steps
    late = [step for step in steps if total is not None and step > total]
    if late:
        within = show([step for step in steps if step not in late])
        yield (
            f"trainer.profile_steps = {show(steps)}: the run ends with step trainer.total_training_steps = {total}; "
            f"set trainer.profile_steps={within}"
        )


@rule("trainer.profile_tool", "trainer.device")
def _nsys_needs_a_gpu(cfg: Any) -> Iterator[str]:
    if cfg.trainer.profile_tool == "nsys" and cfg.trainer.profile_steps:
        yield (
            "trainer.profile_tool = nsys: Nsight Systems is started and stopped through CUDA, which a run on a CPU "
            "does not have; set trainer.profile_tool=torch"
        )


@rule("trainer.flash_attention_impl", "trainer.device")
def _flash_attention_needs_a_gpu(cfg: Any) -> Iterator[str]:
    impl = cfg.trainer.flash_attention_impl
    if impl in FLASH_ATTENTION_IMPLS:
        yield (
            f"trainer.flash_attention_impl = {impl}: runs on GPUs only, and the device is cpu; set trainer.device="
            "cuda, or trainer.flash_attention_impl=null"
        )


LOGGER_RULES = [_known_loggers]
TRAINER_RULES = [_resume, _kept_checkpoints, *LOGGER_RULES, _profiled_ranks, _profiled_steps]
TRAINER_RULES_ON_CPU = [_nsys_needs_a_gpu, _flash_attention_needs_a_gpu]
