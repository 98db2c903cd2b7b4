"""The steps that a run takes, and the checks that its data has enough rows for one step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from scalerl.config.names import ACTOR
from scalerl.config.roles import uses_critic
from scalerl.config.schema import OptimConfig, PPOConfig, RunConfig, SFTConfig


def total_steps(trainer: RunConfig, num_rows: int, batch_size: int) -> int:
    """The number of steps of a run: total_training_steps, or those of total_epochs of the data.

    The last batch of an epoch runs into the next epoch's order.
    """
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return math.ceil(num_rows * trainer.total_epochs / batch_size)


def decay_to_the_end(cfg: PPOConfig | SFTConfig, num_rows: int) -> Iterator[str]:
    """Sets each lr_decay_updates that is null to the optimizer updates of the whole run, where the rate decays.

    num_rows: of the training data. `cfg` must be valid. Yields a violation where the warm-up has as many updates.
    """
    steps = total_steps(cfg.trainer, num_rows, cfg.data.train_batch_size)
    for section, optim, updates in _updates_of_models(cfg, steps):
        if optim.lr_decay_style == "constant" or optim.lr_decay_updates is not None:
            continue
        if optim.lr_warmup_updates >= updates:
            yield (
                f"{section}.lr_warmup_updates = {optim.lr_warmup_updates}: must be below the {updates} optimizer "
                f"updates of the run, where the decay ends; set {section}.lr_warmup_updates lower, or "
                f"{section}.lr_decay_updates"
            )
        else:
            optim.lr_decay_updates = updates


def _updates_of_models(cfg: PPOConfig | SFTConfig, steps: int) -> Iterator[tuple[str, OptimConfig, int]]:
    """The optim sections of the models that a run trains: (key, section, optimizer updates of the run)."""
    if isinstance(cfg, SFTConfig):
        yield "optim", cfg.optim, steps
        return
    batch, actor, critic = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor, cfg.critic
    # The actor does not learn while the critic warms up.
    learns = max(steps - cfg.trainer.critic_warmup, 0)
    yield f"{ACTOR}.optim", actor.optim, learns * (batch // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if uses_critic(cfg):
        yield "critic.optim", critic.optim, steps * (batch // critic.ppo_mini_batch_size) * critic.ppo_epochs


def too_few_prompts(cfg: PPOConfig, num_prompts: int) -> Iterator[str]:
    """The violation of a run whose step takes more prompts than the training data has. `cfg` must be valid."""
    batch, begun = cfg.data.train_batch_size, cfg.data.gen_batch_size
    mini = cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch > num_prompts:
        size = num_prompts // mini * mini or num_prompts
        smaller = "" if size >= mini else f" and {ACTOR}.ppo_mini_batch_size={size}"
        yield (
            f"data.train_batch_size = {batch}: {_repeats(num_prompts, 'prompts', batch)}, or set "
            f"data.train_batch_size={size}{smaller}"
        )
    elif begun > num_prompts:
        yield (
            f"data.gen_batch_size = {begun}: {_repeats(num_prompts, 'prompts', begun)}, or set "
            f"data.gen_batch_size={num_prompts} or less"
        )


def too_few_conversations(cfg: SFTConfig, num_rows: int) -> Iterator[str]:
    """The violation of an SFT run whose update takes more conversations than the data has. `cfg` must be valid."""
    batch = cfg.data.train_batch_size
    if batch > num_rows:
        yield (
            f"data.train_batch_size = {batch}: {_repeats(num_rows, 'conversations', batch)}, or set "
            f"data.train_batch_size={num_rows} or less"
        )


def _repeats(num_rows: int, what: str, needed: int) -> str:
    return (
        f"data.train_files give {num_rows} {what}, so a step would take some of them more than once; give at least "
        f"{needed}"
    )
