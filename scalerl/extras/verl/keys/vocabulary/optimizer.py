"""Keys of verl's optimizers, of `scalerl train` and `scalerl sft`."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.batch_units import lr_steps, lr_warmup_ratio
from scalerl.extras.verl.keys.entry import (
    Becomes,
    Context,
    Entry,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    renamed,
    same,
)


def warmup_style(match: re.Match[str], value: Any, _: Context) -> Outcome:
    """Reads the shape of the learning rate after its warm-up, by its name."""
    if value in ("constant", "cosine", "linear"):
        return Becomes({f"{match[1]}optim.lr_decay_style": value}, "the shape of the learning rate after its warm-up")
    return Refused("must be constant, linear or cosine, as optim.lr_decay_style")


def optimizer_entries(trained: str) -> list[Entry]:
    """Makes the entries of an optimizer and its learning rate.  trained: what precedes `optim`, `(a.|b.)`."""
    return [
        renamed(f"{trained}grad_clip", r"\1optim.clip_grad"),
        same(f"{trained}optim.optimizer", "adam", "adamw", why="the optimizer is Adam with decoupled weight decay"),
        same(f"{trained}optim.optimizer_impl", "torch.optim", why="the optimizer is Megatron's Adam"),
        computed(
            f"{trained}optim.lr_(warmup|decay)_steps",
            "`....optim.lr_warmup_updates`, `....optim.lr_decay_updates`, times the updates of a step",
            "a number of optimizer updates, of which a step has train_batch_size / ppo_mini_batch_size * ppo_epochs",
            lr_steps,
            asks_others=True,
        ),
        computed(
            f"{trained}optim.lr_warmup_steps_ratio",
            "0: already so; else `....optim.lr_warmup_updates`, where trainer.total_training_steps is set",
            "a number of optimizer updates",
            lr_warmup_ratio,
            asks_others=True,
        ),
        same(f"{trained}optim.total_training_steps", why="lr_decay_updates says where the learning rate ends"),
        computed(f"{trained}optim.(warmup_style|lr_scheduler_type)", "`....optim.lr_decay_style`", "", warmup_style),
        absent(f"{trained}optim.lr_warmup_init", 0, None, why="warm-up starts from 0"),
        absent(
            f"{trained}optim.min_lr_ratio",
            0,
            None,
            why="the floor of the learning rate is a number",
            instead="set optim.min_lr",
        ),
        absent(f"{trained}optim.num_cycles", 0.5, None, why="a cosine goes down once"),
        same(f"{trained}optim.weight_decay_incr_style", "constant", why="weight decay stays as it is"),
        goes_with(f"{trained}optim.lr_wsd_*", "lr_decay_style=WSD"),
        goes_with(f"{trained}optim.muon_*", "optimizer=muon"),
        same(
            f"{trained}optim.use_checkpoint_opt_param_scheduler",
            why="a resumed run goes on with the schedule that it would have had",
        ),
        same(
            f"{trained}optim.(use_precision_aware_optimizer|main_grads_dtype|main_params_dtype|exp_avg_dtype|exp_avg_sq_dtype)",
            False,
            "fp32",
            "float32",
            why="main parameters, gradients and moments are float32",
        ),
        same(f"{trained}optim.zero_indexed_step", why="no update has a learning rate of 0 while it warms up"),
    ]
