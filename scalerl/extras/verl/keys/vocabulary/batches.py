"""Keys of verl that divide batches."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.batch_units import pass_micro_batch, tokens_of_a_device, update_micro_batch
from scalerl.extras.verl.keys.entry import AlreadySo, Context, Outcome, Refused, computed, same
from scalerl.extras.verl.keys.vocabulary.words import (
    ACTOR,
    ALL_DEVICES,
    ANY,
    MAX_TOKENS,
    PACKING,
    REF,
    ROLLOUT,
    TRAINED,
)

# Why a fixed number of samples passes: it is verl's default, and asks for another size of micro-batches alone.
FIXED_SIZE_PASSES = "false, verl's default: packed all the same, as loss and gradients do not depend on micro-batches"


def dynamic_batches(_: re.Match[str], value: Any, __: Context) -> Outcome:
    """Reads whether micro-batches are packed by their tokens, or have a fixed number of samples."""
    if value is True:
        return AlreadySo(PACKING)
    return AlreadySo(FIXED_SIZE_PASSES) if value in (False, None) else Refused(f"{PACKING}; leave it out")


BATCHES = [
    computed(
        f"{ANY}.(use_dynamic_bsz|log_prob_use_dynamic_bsz|forward_use_dynamic_bsz)|{ROLLOUT}.log_prob_use_dynamic_bsz",
        "`true`, `false`: already so",
        f"{PACKING}; {FIXED_SIZE_PASSES}",
        dynamic_batches,
    ),
    computed(
        f"{TRAINED}.ppo_max_token_len_per_gpu|({REF}).log_prob_max_token_len_per_gpu|"
        "(reward_model).forward_max_token_len_per_gpu",
        f"`....{MAX_TOKENS}`, times `context_parallel_size`",
        ALL_DEVICES,
        tokens_of_a_device,
        asks_others=True,
    ),
    computed(
        f"{TRAINED}.ppo_micro_batch_size_per_gpu",
        "`....max_tokens_per_micro_batch`, unless that is set: the tokens of so many samples of the greatest length",
        PACKING,
        update_micro_batch,
        asks_others=True,
    ),
    computed(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"`{REF}.max_tokens_per_micro_batch`, unless that is set: the tokens of so many samples of the greatest length",
        PACKING,
        pass_micro_batch,
        asks_others=True,
    ),
    same(f"{TRAINED}.ppo_micro_batch_size", why=f"counts over all devices; {PACKING}"),
    same(f"{REF}.log_prob_micro_batch_size", why=f"counts over all devices; {PACKING}"),
    same(
        f"{ROLLOUT}.log_prob_(micro_batch_size|micro_batch_size_per_gpu|max_token_len_per_gpu)",
        why=f"this pass has the micro-batches of {ACTOR}.max_tokens_per_micro_batch; no number depends on it",
    ),
    same(
        f"{ACTOR}.ppo_infer_(micro_batch_size_per_gpu|max_token_len_per_gpu)",
        why=f"this pass has the micro-batches of {ACTOR}.max_tokens_per_micro_batch; no number depends on it",
    ),
    same(
        "critic.(forward_micro_batch_size|forward_micro_batch_size_per_gpu|forward_max_token_len_per_gpu|"
        "ppo_infer_micro_batch_size_per_gpu|ppo_infer_max_token_len_per_gpu)",
        why="this pass has the micro-batches of critic.max_tokens_per_micro_batch; no number depends on it",
    ),
    same("reward_model.(micro_batch_size|micro_batch_size_per_gpu|max_length)", why=PACKING),
    same(f"{TRAINED}.shuffle", False, why="mini-batches are the step's samples in the order of their prompts"),
    same(f"{TRAINED}.data_loader_seed", why="mini-batches are not shuffled"),
    same("critic.rollout_n", why=f"{ROLLOUT}.n says it"),
]
