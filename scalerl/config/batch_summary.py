"""The table of how a step's prompts become micro-batches, with the key that sets each number."""

from __future__ import annotations

import math

from scalerl.config.layout import LONGEST_SAMPLE, longest_sample
from scalerl.config.names import ACTOR
from scalerl.config.pools import trained_layout
from scalerl.config.run_length import total_steps
from scalerl.config.schema import PPOConfig


def batch_table(cfg: PPOConfig, num_prompts: int | None = None) -> str:
    """Makes the table of batch sizes that a run prints at its start. `cfg` must be valid.

    Args:
        num_prompts: prompts of the training data; None leaves out the steps of an epoch and of the run.
    """
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    layout = trained_layout(cfg)
    prompts, n, mini = cfg.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size
    longest, tokens = longest_sample(cfg), actor.max_tokens_per_micro_batch
    per_rank = mini * n / layout.dp_size
    most = math.ceil(per_rank) * longest
    updates = f"{prompts // mini}"
    if actor.ppo_epochs > 1:
        updates += f" x {actor.ppo_epochs} = {prompts // mini * actor.ppo_epochs} updates"
    divided = [("tensor", layout.tp_size), ("pipeline", layout.pp_size)]
    if layout.cp_size > 1:
        divided.insert(1, ("context", layout.cp_size))
    rows = [
        ("prompts per step", f"{prompts}", "data.train_batch_size"),
        ("x samples per prompt", f"{n}", "actor_rollout_ref.rollout.n"),
        ("= samples per step", f"{prompts * n}", ""),
        ("mini-batches per step", updates, "ppo_mini_batch_size, ppo_epochs"),
        ("samples per mini-batch", f"{mini * n}", "actor_rollout_ref.actor.ppo_mini_batch_size x n"),
        (
            "data-parallel ranks",
            f"{layout.world_size} / ({' x '.join(str(size) for _, size in divided)}) = {layout.dp_size}",
            f"devices / ({' x '.join(name for name, _ in divided)} parallel sizes)",
        ),
        ("samples per mini-batch and rank", f"about {round(per_rank, 1):g}", "balanced by tokens"),
        ("tokens per mini-batch and rank", f"up to about {most}", LONGEST_SAMPLE),
        ("tokens per micro-batch", f"at most {tokens}", f"{ACTOR}.max_tokens_per_micro_batch"),
        (
            "micro-batches per mini-batch",
            _micro_batches(math.ceil(per_rank), longest, tokens),
            "as few as hold the samples",
        ),
    ]
    if num_prompts is not None:
        rows += _step_rows(cfg, num_prompts)
    return _table(rows)


def _micro_batches(samples: int, longest: int, max_tokens_per_micro_batch: int) -> str:
    """The number of micro-batches: between 1 and what samples of full length need, each in one micro-batch whole."""
    most = math.ceil(samples / (max_tokens_per_micro_batch // longest))
    return "1" if most == 1 else f"1 to {most}"


def _step_rows(cfg: PPOConfig, num_prompts: int) -> list[tuple[str, str, str]]:
    batch_size = cfg.data.train_batch_size
    is_given = cfg.trainer.total_training_steps is not None
    # Not a whole number: a step may take the last prompts of one epoch and the first of the next.
    per_epoch = f"{num_prompts} / {batch_size} = {num_prompts / batch_size:.4g}"
    return [
        ("steps per epoch", per_epoch, "prompts of the data / data.train_batch_size"),
        (
            "steps of the run",
            f"{total_steps(cfg.trainer, num_prompts, batch_size)}",
            "trainer.total_training_steps" if is_given else "trainer.total_epochs, the last step whole",
        ),
    ]


def _table(rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows)
