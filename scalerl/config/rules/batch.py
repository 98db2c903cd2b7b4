"""Rules of batches and of the tokens of a micro-batch, for the model that is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalerl.config.batch_sizes import (
    LONGEST_SAMPLE,
    LONGEST_SAMPLE_KEYS,
    fewest_samples,
    longest_sample,
    tokens_needed,
)
from scalerl.config.layout_sizes import trained_layout
from scalerl.config.rules.base import Rule, rule
from scalerl.config.schema import PPOConfig, SFTConfig
from scalerl.config.sections import ACTOR, ROLLOUT, alignment_keys, trained_layout_keys
from scalerl.config.suggestions import divisors, nearest, nearest_multiples

# PPO


@rule("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
def _mini_batches_divide_the_batch(cfg: PPOConfig) -> Iterator[str]:
    prompts, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size = {mini}: must divide data.train_batch_size = {prompts}; set "
            f"{ACTOR}.ppo_mini_batch_size={nearest(mini, divisors(prompts))}, or "
            f"data.train_batch_size={nearest_multiples(prompts, mini)}"
        )


@rule(f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", *trained_layout_keys(f"{ACTOR}.megatron"))
def _mini_batch_feeds_ranks(cfg: PPOConfig) -> Iterator[str]:
    mini, n = cfg.actor_rollout_ref.actor.ppo_mini_batch_size, cfg.actor_rollout_ref.rollout.n
    needed, what = fewest_samples(trained_layout(cfg))
    if mini * n < needed:
        yield (
            f"{ACTOR}.ppo_mini_batch_size x {ROLLOUT}.n = {mini} x {n} = {mini * n} samples: must be at least the "
            f"{what}; set {ACTOR}.ppo_mini_batch_size={math.ceil(needed / n)} or more, or train on fewer devices"
        )


@rule(*LONGEST_SAMPLE_KEYS, f"{ACTOR}.max_tokens_per_micro_batch", *alignment_keys(f"{ACTOR}.megatron"))
def _longest_sample_fits(cfg: PPOConfig) -> Iterator[str]:
    actor, longest = cfg.actor_rollout_ref.actor, longest_sample(cfg)
    key, needed = f"{ACTOR}.max_tokens_per_micro_batch", tokens_needed(longest, actor.megatron)
    if actor.max_tokens_per_micro_batch < needed:
        yield (
            f"{key} = {actor.max_tokens_per_micro_batch}: must hold the longest sample, {LONGEST_SAMPLE} = {longest}; "
            f"set {key}={needed} or more"
        )


PPO_BATCH_RULES: list[Rule] = [_mini_batches_divide_the_batch, _mini_batch_feeds_ranks, _longest_sample_fits]


# SFT


@rule("data.train_batch_size", *trained_layout_keys("megatron"))
def _batch_feeds_ranks(cfg: SFTConfig) -> Iterator[str]:
    needed, what = fewest_samples(trained_layout(cfg))
    if cfg.data.train_batch_size < needed:
        yield (
            f"data.train_batch_size = {cfg.data.train_batch_size}: must be at least the {what}; set "
            f"data.train_batch_size={needed} or more, or train on fewer devices"
        )


@rule("data.max_length", "data.max_tokens_per_micro_batch", *alignment_keys("megatron"))
def _longest_conversation_fits(cfg: SFTConfig) -> Iterator[str]:
    key, needed = "data.max_tokens_per_micro_batch", tokens_needed(cfg.data.max_length, cfg.megatron)
    if cfg.data.max_tokens_per_micro_batch < needed:
        yield (
            f"{key} = {cfg.data.max_tokens_per_micro_batch}: must hold the longest conversation, data.max_length = "
            f"{cfg.data.max_length}; set {key}={needed} or more"
        )


SFT_BATCH_RULES: list[Rule] = [_batch_feeds_ranks, _longest_conversation_fits]
