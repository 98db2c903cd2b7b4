"""Rules of where a step's samples come from: over-sampling, dynamic sampling, samples of older policies."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.correction import corrects
from scalerl.config.rules.base import rule
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import CORRECTION, HYBRID, ROLLOUT

_STALENESS, _PARTIAL = "trainer.max_staleness", f"{ROLLOUT}.partial_rollout"
_GEN, _TRAIN = "data.gen_batch_size", "data.train_batch_size"
_FILTER = "algorithm.filter_groups"


@rule(f"{ROLLOUT}.val_kwargs.n")
def _greedy_validation(cfg: PPOConfig) -> Iterator[str]:
    sampling, key = cfg.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if sampling.n > 1 and not sampling.do_sample:
        yield (
            f"{key}.n = {sampling.n}: greedy decoding gives the same answer each time; set {key}.do_sample=true, or "
            f"{key}.n=1"
        )


@rule(_GEN, _TRAIN, _STALENESS)
def _gen_batch(cfg: PPOConfig) -> Iterator[str]:
    gen, train = cfg.data.gen_batch_size, cfg.data.train_batch_size
    if gen < train:
        yield f"{_GEN} = {gen}: must be at least {_TRAIN} = {train}; set {_GEN}={train} or more"
    elif gen > train and not cfg.actor_rollout_ref.hybrid_engine and cfg.trainer.max_staleness:
        yield (
            f"{_GEN} = {gen}: over-sampling ends what the servers run, and with {_STALENESS} = "
            f"{cfg.trainer.max_staleness} they run the next steps' prompts too; set {_GEN}={train}"
        )


@rule(f"{_FILTER}.metric", f"{ROLLOUT}.n")
def _filter(cfg: PPOConfig) -> Iterator[str]:
    if not cfg.algorithm.filter_groups.enable:
        return
    if cfg.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{ROLLOUT}.n = 1: {_FILTER}.enable drops groups whose samples are alike, and those of a group of one are; "
            f"set {ROLLOUT}.n=2 or more"
        )
    if cfg.reward_model.enable:
        yield (
            f"{_FILTER}.enable = true: a reward model scores when generation is over, so that nothing can be refilled; "
            f"set reward_model.enable=false, or {_FILTER}.enable=false"
        )


@rule(_STALENESS, _GEN, _TRAIN, f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_is")
def _staleness(cfg: PPOConfig) -> Iterator[str]:
    bound, partial = cfg.trainer.max_staleness, cfg.actor_rollout_ref.rollout.partial_rollout
    lacks = list(_lacks_of_older_samples(cfg)) if bound or partial else []
    if lacks:
        key, value = (_PARTIAL, "true") if partial else (_STALENESS, bound)
        ways = [f"{_PARTIAL}=false"] if partial else []
        ways += [f"{_STALENESS}=0"] if bound else []
        pool = f"{HYBRID}=false and {ROLLOUT}.resource_pool.nnodes=1"
        own = f"; or give the servers devices of their own: {pool}" if cfg.actor_rollout_ref.hybrid_engine else ""
        yield (
            f"{key} = {value}: {', and '.join(why for why, _ in lacks)}; set "
            f"{' and '.join(setting for _, settings in lacks for setting in settings)}, or {' and '.join(ways)}{own}"
        )


def _lacks_of_older_samples(cfg: PPOConfig) -> Iterator[tuple[str, list[str]]]:
    """What training on samples of older policies lacks: (why, settings that provide it)."""
    partial, train = cfg.actor_rollout_ref.rollout.partial_rollout, cfg.data.train_batch_size
    correction = cfg.algorithm.rollout_correction
    if not cfg.trainer.max_staleness:
        yield f"an interrupted sample goes on under a newer policy, which {_STALENESS} = 0 forbids", [f"{_STALENESS}=1"]
    if cfg.actor_rollout_ref.hybrid_engine:
        if not partial:
            yield (
                "servers on the trainer's devices cannot generate while it computes, and have unfinished samples to go "
                "on with alone",
                [f"{_PARTIAL}=true"],
            )
        if cfg.data.gen_batch_size <= train:
            # Half as many again: those that are unfinished when the others fill the batch.
            yield (
                f"nothing is left unfinished while {_GEN} = {_TRAIN} = {train}",
                [f"{_GEN}={train + max(1, train // 2)}"],
            )
    if not corrects(correction):
        settings = [f"{CORRECTION}.bypass_mode=false"] if correction.bypass_mode else []
        yield (
            "samples of an older policy need a correction of the loss",
            [*settings, f"{CORRECTION}.rollout_is=token"],
        )


SAMPLING_RULES = [_gen_batch, _filter, _staleness, _greedy_validation]
