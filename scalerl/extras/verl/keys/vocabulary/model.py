"""Keys of verl's sections of models, of `scalerl train` and `scalerl sft`."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.entry import (
    AlreadySo,
    Becomes,
    Context,
    Entry,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    is_one_of,
    same,
)
from scalerl.extras.verl.keys.vocabulary.words import ACTOR, ANY, MODEL, NONE, OFF, PACKED


def _recompute(match: re.Match[str], value: Any, context: Context) -> Outcome:
    megatron = {MODEL: f"{ACTOR}.megatron", "critic.model": "critic.megatron", "model": "megatron"}[match[1]]
    if value is False or context.is_set(f"{megatron}.recompute_granularity"):
        return AlreadySo(f"{megatron}.recompute_granularity says what is computed again")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return Becomes({f"{megatron}.{name}": setting for name, setting in full.items()}, "memory against time alone")


def _tokenizer_path(match: re.Match[str], value: Any, context: Context) -> Outcome:
    policy = "model" if match[1] == "model" else MODEL
    paths = [context.value(key) for key in (f"{policy}.path", f"{match[1]}.path")]
    if value is None or value in paths or "${" in str(value):
        return AlreadySo("the tokenizer is the policy's")
    return Refused(f"has no counterpart because the tokenizer is that of {policy}.path; leave it out")


def _chat_template(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """Reads the policy's own template: `@FILE`, or its text."""
    if is_one_of(value, NONE):
        return AlreadySo("asks for nothing (the chat template is that in the model's directory)")
    if str(value).startswith("@"):
        return Becomes({"data.chat_template_path": str(value)[1:]})
    return Refused("a template is read from a file; write it to one, leave this out, and set data.chat_template_path")


def model_entries(trained: str, others: str = "") -> list[Entry]:
    """Makes the entries of the sections of models.  trained, others: their names, `a|b`; others begins with `|`."""
    return [
        same(
            rf"({trained}{others}).use_remove_padding|{ANY}.megatron.use_remove_padding",
            True,
            why=PACKED,
        ),
        same(
            f"({trained}{others}|{ACTOR}).use_fused_kernels",
            why="log-probs and entropy are computed from the hidden states in pieces; no number depends on it",
        ),
        same(
            f"({trained}{others}).fused_kernel_options.**",
            why="log-probs are computed from the hidden states in pieces",
        ),
        same(f"({trained}).use_liger", why="kernels are those of Megatron and torch; no number depends on it"),
        computed(
            f"({trained}).enable_gradient_checkpointing",
            "`...megatron.recompute_granularity=full`, `recompute_method=uniform`, `recompute_num_layers=1`",
            "memory against time alone",
            _recompute,
        ),
        same(f"({trained}).gradient_checkpointing_kwargs.**", why="recompute_* of the megatron section say it"),
        absent(
            f"({trained}).enable_activation_offload",
            *OFF,
            why="activations stay on the device",
            instead="leave it out, and set recompute_* of the megatron section where memory is short",
        ),
        absent(
            f"({trained}).(lora_rank|lora.rank|lora_adapter_path|lora.adapter_path)",
            *NONE,
            why="all weights of a model are trained, without adapters",
        ),
        goes_with(
            f"({trained}).(lora_alpha|target_modules|exclude_modules|lora.**|target_parameters)",
            "lora_rank",
        ),
        absent(
            f"({trained}{others}).external_lib",
            *NONE,
            why="no module is imported for a model",
            instead="leave it out, and name files of your own in trainer.import_files",
        ),
        computed(
            f"({MODEL}|model).custom_chat_template",
            "`@FILE`: `data.chat_template_path`",
            "a template is read from a file",
            _chat_template,
        ),
        absent(
            f"({trained}).(custom_chat_template|hf_config_path)",
            *NONE,
            why="config.json and the chat template are those in the model's directory",
            instead="leave it out, and change the files there",
        ),
        absent(
            f"({trained}{others}).use_shm",
            *NONE,
            why="model and tokenizer are read from the model's directory",
        ),
        computed(
            f"({trained}{others}).(tokenizer_path|input_tokenizer)",
            "already so where it is the model's directory",
            "the tokenizer is the policy's",
            _tokenizer_path,
        ),
        same(
            f"({trained}).override_config.attn_implementation",
            why="attention is torch's or, with megatron.cp_comm_type, Transformer Engine's",
        ),
        absent(
            f"({trained}).override_config.model_config.**|({trained}).override_config.moe_config.**",
            False,
            None,
            why="a model is what its config.json says",
            instead="leave it out, and change config.json",
        ),
        absent(
            f"({trained}).override_config|({trained}).override_config.(model_config|moe_config)",
            {},
            None,
            why="a model is what its config.json says",
            instead="leave it out, and change config.json",
        ),
        absent(
            f"({trained}).override_config.**",
            why="a model is what its config.json says",
            instead="leave it out, and change config.json",
        ),
        absent(f"({trained}).mtp.enable", *OFF, why="prediction layers are not trained"),
        goes_with(f"({trained}).mtp.**", "mtp.enable"),
        same(
            f"({trained}).(load_tokenizer|tiled_mlp.**)",
            why="models are read from their directories",
        ),
    ]
