"""Keys that go with others: values that another key needs where the user set only that, and values without effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scalerl.config.registered_names import GROUP_ESTIMATORS
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import ACTOR, ROLLOUT
from scalerl.config.value_checks import show

# The metrics of a validation by which checkpoints are ranked, where the user names none (trainer.best_ckpt_metric).
BEST_METRIC: dict[Literal["ppo", "sft"], str] = {"ppo": "val-core/*/reward/mean@*", "sft": "val/loss"}
# Samples per prompt of an estimator that compares them.
GROUP_SIZE = 8
# A mini-batch of PPO has this many prompts, or those of the step where these are fewer.
_MINI_BATCH = 256
# The paper of the overlong penalty (arXiv 2503.14476) has 4096 of 20480 tokens.
_PENALIZED_SHARE = 5


@dataclass(frozen=True)
class Companion:
    """A default of `key` that follows from other keys.

    of: those keys; the first is the one that needs a companion.  value: called with their values; None where the usual
    default of `key` goes with them.  kind: the only configuration that has it; None: every one with these keys.
    """

    key: str
    of: tuple[str, ...]
    value: Callable[..., Any]
    kind: Literal["ppo", "sft"] | None = None

    def line(self, value: Any, values: tuple[Any, ...]) -> str:
        """The line that a run prints about it at its start.  values: of the keys in `of`."""
        reasons = ", ".join(f"{key} = {show(other)}" for key, other in zip(self.of, values, strict=True))
        return f"{self.key} = {show(value)}, which follows from {reasons}"


COMPANIONS = (
    Companion(
        f"{ROLLOUT}.n", ("algorithm.adv_estimator",), lambda name: GROUP_SIZE if name in GROUP_ESTIMATORS else None
    ),
    Companion(
        f"{ACTOR}.ppo_mini_batch_size",
        ("data.train_batch_size",),
        lambda prompts: prompts if 1 <= prompts < _MINI_BATCH else None,
    ),
    Companion(f"{ROLLOUT}.val_kwargs.do_sample", (f"{ROLLOUT}.val_kwargs.n",), lambda n: True if n > 1 else None),
    Companion(
        f"{ROLLOUT}.weight_transport_dir",
        (f"{ROLLOUT}.weight_transport", "trainer.default_local_dir"),
        lambda transport, run: run if transport == "disk" else None,
    ),
    Companion(
        "reward_model.reward_manager",
        ("reward_model.overlong_buffer.enable",),
        lambda enable: "dapo" if enable else None,
    ),
    Companion(
        "reward_model.overlong_buffer.len",
        ("reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.max_resp_len"),
        lambda enable, tokens: max(1, tokens // _PENALIZED_SHARE) if enable else None,
    ),
    *(
        Companion(
            "trainer.best_ckpt_metric",
            ("trainer.best_ckpt_to_keep",),
            lambda count, metric=metric: metric if count else None,
            kind,
        )
        for kind, metric in BEST_METRIC.items()
    ),
    Companion(
        "trainer.test_freq",
        ("trainer.best_ckpt_to_keep", "trainer.save_freq"),
        lambda count, save_freq: save_freq if count and save_freq > 0 else None,
    ),
    *(
        Companion("trainer.max_actor_ckpt_to_keep", (key,), lambda value: 1 if value else None)
        for key in ("trainer.best_ckpt_to_keep", "trainer.ckpt_every_to_keep")
    ),
)


def without_effect(config: Any, set_keys: Collection[str]) -> Iterator[str]:
    """Yields a line for each key that the user set and that has no effect as another key stands, which is not set."""
    section = f"{ROLLOUT}.val_kwargs"
    if f"{section}.do_sample" in set_keys or not isinstance(config, PPOConfig):
        return
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    idle = [f"{section}.{name}" for name in ("temperature", "top_p", "top_k") if f"{section}.{name}" in set_keys]
    if idle and not sampling.do_sample:
        yield (
            f"{', '.join(idle)}: no effect, as validations are greedy; set {section}.do_sample=true for samples, or "
            "false to say so"
        )
