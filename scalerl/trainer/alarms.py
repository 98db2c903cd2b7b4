"""Alarms: what is wrong with a run, by the metrics of its steps, and what to try first (`trainer.alarms`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalerl.config import PPOConfig

# Names of metrics that an alarm counts with.
FAILED, TOKENS_MIN, TOKENS_MAX = "reward/num_failed", "global_seqlen/balanced_min", "global_seqlen/balanced_max"


@dataclass(frozen=True)
class Kind:
    """A kind of alarm.  limit: its key in trainer.alarms.  metrics: each by itself raises it beyond that limit.

    means, remedy: what is wrong, and what to try first.
    """

    limit: str
    metrics: tuple[str, ...]
    means: str
    remedy: str

    def is_beyond(self, value: float, limit: float) -> bool:
        return value < limit if self.limit.startswith("min_") else value > limit


# Shares that are no metrics by themselves.
FAILED_FRAC, LOAD_FRAC = f"{FAILED} of the step's samples", f"{TOKENS_MIN} / {TOKENS_MAX}"
KINDS: Mapping[str, Kind] = {
    "kl": Kind(
        "max_kl",
        ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"),
        "the policy runs away from the reference, or from the policy that sampled",
        "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.kl_loss_coef or "
        "algorithm.kl_ctrl.kl_coef",
    ),
    "entropy": Kind(
        "min_entropy",
        ("actor/entropy",),
        "the policy gives nearly the same answer each time, and explores nothing",
        "raise actor_rollout_ref.actor.clip_ratio_high (to 0.28), or actor_rollout_ref.actor.entropy_coeff (to 0.001)",
    ),
    "length": Kind(
        "max_clip_ratio",
        ("response_length/clip_ratio",),
        "responses run into the limit of tokens before they answer",
        "read some responses (trainer.log_val_generations); raise data.max_response_length, or set "
        "reward_model.overlong_buffer.enable=true",
    ),
    "equal_rewards": Kind(
        "max_equal_groups_frac",
        ("reward/equal_groups_frac",),
        "the samples of most groups have one score, so they teach nothing",
        "take harder or easier prompts, raise actor_rollout_ref.rollout.n, or set algorithm.filter_groups.enable=true",
    ),
    "mismatch": Kind(
        "max_probs_diff",
        ("training/rollout_probs_diff_mean",),
        "sampler and trainer give the sampled tokens different probabilities",
        "set algorithm.rollout_correction.rollout_is=token; give actor_rollout_ref.rollout.dtype and "
        "actor_rollout_ref.actor.megatron.dtype one value; lower trainer.max_staleness",
    ),
    "starved_ranks": Kind(
        "min_load_frac",
        (LOAD_FRAC,),
        "a data-parallel rank has so few tokens that it waits for the others",
        "raise data.train_batch_size and actor_rollout_ref.actor.ppo_mini_batch_size, or take fewer such ranks",
    ),
    "failed_rewards": Kind(
        "max_failed_frac",
        (FAILED_FRAC,),
        "the reward function fails for many samples, which then count as wrong",
        "read the warning with the first cause; correct the reward function, or what it calls",
    ),
}


@dataclass(frozen=True)
class Raised:
    """An alarm of one step.  metric, value: the one that is beyond the limit."""

    name: str
    metric: str
    value: float
    limit: float

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def line(self, step: int) -> str:
        """The line of the progress."""
        side = "below" if self.kind.limit.startswith("min_") else "above"
        return (
            f"alarm {self.name} at step {step}: {self.metric} {self.value:.3g} is {side} "
            f"trainer.alarms.{self.kind.limit}={self.limit:g}: {self.kind.means}. Try first: {self.kind.remedy}"
        )


def raised(metrics: Mapping[str, float], limits: Mapping[str, float | None], num_samples: int) -> list[Raised]:
    """The alarms of a step, at most one of each kind.

    metrics: as they are logged; of what is not among them nothing is said.  limits: the keys of trainer.alarms.
    num_samples: of a step.
    """
    values = {**metrics, **_shares(metrics, num_samples)}
    alarms = []
    for name, kind in KINDS.items():
        limit = limits[kind.limit]
        beyond = [] if limit is None else [m for m in kind.metrics if m in values and kind.is_beyond(values[m], limit)]
        if limit is not None and beyond:
            alarms.append(Raised(name, beyond[0], values[beyond[0]], limit))
    return alarms


def _shares(metrics: Mapping[str, float], num_samples: int) -> dict[str, float]:
    shares = {}
    if FAILED in metrics:
        shares[FAILED_FRAC] = metrics[FAILED] / num_samples
    if metrics.get(TOKENS_MAX):
        shares[LOAD_FRAC] = metrics[TOKENS_MIN] / metrics[TOKENS_MAX]
    return shares


@dataclass
class Alarms:
    """The alarms of this process so far; a resumed run says again what it meets again.

    first_steps: name of an alarm -> the step that raised it first.
    """

    first_steps: dict[str, int] = field(default_factory=dict)

    def new(self, config: PPOConfig, metrics: Mapping[str, float], step: int) -> list[Raised]:
        """The alarms of a step that no step before has raised."""
        num_samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        alarms = raised(metrics, vars(config.trainer.alarms), num_samples)
        return [alarm for alarm in alarms if self.first_steps.setdefault(alarm.name, step) == step]
