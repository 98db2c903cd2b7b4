"""Rules of what a step's samples are taken from: over-sampling, dynamic sampling, samples of older policies."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.correction import SECTION as CORRECTION
from scalerl.config.correction import corrects
from scalerl.config.rules.base import Rule
from scalerl.config.rules.layout import ROLLOUT
from scalerl.config.schema import PPOConfig

STALENESS, PARTIAL = "trainer.max_staleness", f"{ROLLOUT}.partial_rollout"
GEN, TRAIN = "data.gen_batch_size", "data.train_batch_size"
FILTER = "algorithm.filter_groups"
HYBRID = "actor_rollout_ref.hybrid_engine"


def _gen_batch(cfg: PPOConfig) -> Iterator[str]:
    gen, train = cfg.data.gen_batch_size, cfg.data.train_batch_size
    if gen < train:
        yield f"{GEN} = {gen}: must be at least {TRAIN} = {train}; set {GEN}={train} or more"
    elif gen > train and not cfg.actor_rollout_ref.hybrid_engine and cfg.trainer.max_staleness:
        yield (
            f"{GEN} = {gen}: over-sampling ends what the servers run, and with {STALENESS} = "
            f"{cfg.trainer.max_staleness} they run the next steps' prompts too; set {GEN}={train}"
        )


def _filter(cfg: PPOConfig) -> Iterator[str]:
    if not cfg.algorithm.filter_groups.enable:
        return
    if cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n = 1: {FILTER}.enable drops groups whose samples are alike, and those of a group of one are; "
            f"set {ROLLOUT}.n=2 or more"
        )
    if cfg.reward_model.enable:
        yield (
            f"{FILTER}.enable = true: a reward model scores when generation is over, so that nothing can be refilled; "
            f"set reward_model.enable=false, or {FILTER}.enable=false"
        )


def _staleness(cfg: PPOConfig) -> Iterator[str]:
    bound, partial = cfg.trainer.max_staleness, cfg.actor_rollout_ref.rollout.partial_rollout
    hybrid = cfg.actor_rollout_ref.hybrid_engine
    if partial and not bound:
        yield (
            f"{PARTIAL} = true: an interrupted sample goes on under a newer policy, which {STALENESS} = 0 forbids; set "
            f"{STALENESS}=1 or more, or {PARTIAL}=false"
        )
    if bound and hybrid and not partial:
        yield (
            f"{STALENESS} = {bound}: servers on the trainer's devices cannot generate while it computes; give them "
            f"devices of their own ({HYBRID}=false), carry unfinished samples from step to step ({PARTIAL}=true with "
            f"{GEN} above {TRAIN}), or set {STALENESS}=0"
        )
    if bound and hybrid and partial and cfg.data.gen_batch_size == cfg.data.train_batch_size:
        yield (
            f"{PARTIAL} = true: nothing is left unfinished while {GEN} = {TRAIN} = {cfg.data.train_batch_size}; set "
            f"{GEN} to more, or {PARTIAL}=false and {STALENESS}=0"
        )
    if bound and not corrects(cfg.algorithm.rollout_correction):
        yield (
            f"{STALENESS} = {bound}: samples of an older policy need a correction of the loss; set "
            f"{CORRECTION}.rollout_is=token (or sequence), or {CORRECTION}.rollout_rs, or {STALENESS}=0"
        )


SAMPLING_RULES = [
    Rule((GEN, TRAIN, STALENESS), _gen_batch),
    Rule((f"{FILTER}.metric", f"{ROLLOUT}.n"), _filter),
    Rule((STALENESS, GEN, TRAIN, f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_is"), _staleness),
]
