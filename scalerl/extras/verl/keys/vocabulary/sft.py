"""Keys of verl's fine-tuning trainers that those of PPO do not have by that name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from scalerl.config.keys import key_table
from scalerl.config.schema import MegatronConfig, SFTConfig
from scalerl.extras.verl.keys.batch_units import lr_warmup_ratio, tokens_of_a_device
from scalerl.extras.verl.keys.entry import (
    AlreadySo,
    Becomes,
    Context,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    renamed,
    same,
)
from scalerl.extras.verl.keys.overrides import OVERRIDE_ENTRIES
from scalerl.extras.verl.keys.vocabulary.actor import save_contents
from scalerl.extras.verl.keys.vocabulary.batches import FIXED_SIZE_PASSES, dynamic_batches
from scalerl.extras.verl.keys.vocabulary.megatron import engine_entries
from scalerl.extras.verl.keys.vocabulary.optimizer import warmup_style
from scalerl.extras.verl.keys.vocabulary.words import (
    ALL_DEVICES,
    MAX_TOKENS,
    MEGATRON,
    NONE,
    OF_FSDP,
    OFF,
    PACKED,
    PACKING,
)

_MEGATRON_FIELDS = "|".join(name for name in MegatronConfig.__dataclass_fields__ if not name.startswith("override_"))


@dataclass(frozen=True)
class _OfEngine:
    """The rest of the configuration, with verl's keys of its section `engine` as those of `megatron`."""

    context: Context

    def value(self, key: str) -> Any:
        return self.context.value(key)

    def is_set(self, key: str) -> bool:
        return self.context.is_set(key)

    def left_open(self, key: str) -> str | None:
        return self.context.left_open(key)

    def foreign(self, key: str) -> Any:
        names = (key, re.sub("^megatron", "engine", key))
        return next((value for name in names if (value := self.context.foreign(name)) is not None), None)


def _override(match: re.Match[str], value: Any, context: Context) -> Outcome | None:
    """Reads a field of Megatron's own configs as its key in the section `megatron` is read."""
    key = f"megatron.{match[1]}"
    if value in ({}, None) and "." not in match[1]:
        return AlreadySo("asks for nothing")
    if isinstance(value, dict):
        return None
    matches = ((entry, entry.regex.fullmatch(key)) for entry in OVERRIDE_ENTRIES)
    outcomes = (entry.read(fits, value, _OfEngine(context)) for entry, fits in matches if fits)
    return next((outcome for outcome in outcomes if outcome is not None), Becomes({key: value}))


def _config_group(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
    """Reads verl's choice of a group of defaults, `optim=megatron`; what is a section is none."""
    return AlreadySo("the keys of the section say it") if isinstance(value, str) else None


def _no_field(match: re.Match[str], value: Any, _: Context) -> Outcome | None:
    """Reads a key of the section `engine` that no engine of verl has as a misspelt one of the section `megatron`."""
    if isinstance(value, dict) and value:
        return None
    return Refused(key_table(SFTConfig).unknown(f"megatron.{match[1]}").partition(": ")[2])


def _after_each_epoch(match: re.Match[str], value: Any, _: Context) -> Outcome | None:
    if value != "after_each_epoch":
        return None
    return Refused(
        f"is a number of steps; set trainer.{match[1]} to those of an epoch, the rows of data.train_files divided by "
        "data.train_batch_size"
    )


SFT = [
    computed(
        "(data|engine).max_token_len_per_gpu",
        f"`data.{MAX_TOKENS}`, times `megatron.context_parallel_size`",
        ALL_DEVICES,
        tokens_of_a_device,
        asks_others=True,
    ),
    same("(data|engine).(infer_|)(micro_batch_size|micro_batch_size_per_gpu)", why=PACKING),
    computed(
        "(data|engine).use_dynamic_bsz",
        "`true`, `false`: already so",
        f"{PACKING}; {FIXED_SIZE_PASSES}",
        dynamic_batches,
    ),
    same(
        "engine.infer_max_token_len_per_gpu", why="every pass has the micro-batches of data.max_tokens_per_micro_batch"
    ),
    same("data.pad_mode", "no_padding", why=PACKED),
    same("data.(balance_dp_token|num_workers)", why="conversations are tokenized once and balanced by their tokens"),
    absent("data.(train_max_samples|val_max_samples)", -1, None, why="all rows are used"),
    absent(
        "data.enable_thinking_key",
        "enable_thinking",
        None,
        why="variables of the chat template are the same for all rows",
        instead="leave it out, and set data.chat_template_kwargs",
    ),
    renamed("data.trust_remote_code", "model.trust_remote_code", neutral=OFF, why="the tokenizer is the model's"),
    renamed("(model|trainer).partial_pretrain", "model.path"),
    same("data.(chat_template|multiturn.enable)", None, False, True, why="a row has its messages"),
    renamed("data.multiturn.messages_key", "data.messages_key"),
    renamed("data.multiturn.tools_key", "data.tools_key"),
    same("model.strategy", "megatron", "fsdp", "fsdp2", why=MEGATRON),
    same("(engine.|)use_remove_padding", True, why=PACKED),
    renamed(
        "(engine.|)ulysses_sequence_parallel_size",
        "megatron.context_parallel_size",
        why="devices that share a sequence, by Ulysses",
    ),
    renamed(f"engine.({_MEGATRON_FIELDS})", r"megatron.\1"),
    computed(
        "engine.(override_(transformer|ddp)_config(.**|))",
        "`megatron.override_...`",
        "fields of Megatron's own configs",
        _override,
        asks_others=True,
    ),
    computed("optim|model", "the name of a group: already so", "the keys of the section say it", _config_group),
    computed("trainer.(test_freq|save_freq)", "`after_each_epoch`: refused", "a number of steps", _after_each_epoch),
    renamed("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
    computed("checkpoint.(save_contents|load_contents|contents)", "as those of PPO's actor", "", save_contents),
    same("checkpoint.*", False, None, why="a checkpoint holds the whole model"),
    same("data.ignore_input_ids_mismatch", why="a conversation is tokenized as a whole, never turn by turn"),
    absent(
        "engine.dist_checkpointing_path",
        *NONE,
        why="a model starts from a Hugging Face directory, of which each rank reads its part",
        instead="leave it out, and set model.path to that directory",
    ),
    *engine_entries("engine"),
    same(
        "engine.(use_fused_kernels|use_entropy_chunking|entropy_chunk_size)",
        why="the loss is computed in pieces; no number depends on it",
    ),
    same("engine|engine.(name|forward_only|load_weight)", why=MEGATRON),
    same(f"(model.fsdp_config|engine).({OF_FSDP})", why=MEGATRON),
    computed("engine.(**)", "any other: refused, no such key", "", _no_field),
    renamed("optim.clip_gradient|optim.grad_clip", "optim.clip_grad"),
    computed(
        "()optim.warmup_steps_ratio",
        "as `optim.lr_warmup_steps_ratio`",
        "a number of optimizer updates",
        lr_warmup_ratio,
        asks_others=True,
    ),
    computed("()optim.lr_scheduler", "`optim.lr_decay_style`", "", warmup_style),
    absent(
        "data.(prompt_key|response_key|prompt_dict_keys|response_dict_keys)",
        None,
        why="a row is a conversation, a list of messages in data.messages_key",
        instead="leave it out, and write such files with `scalerl data own --sft`",
    ),
    renamed("trainer.seed", "data.seed", why="the order of the rows"),
    goes_with("trainer.profile_interval", "global_profiler.steps"),
]
