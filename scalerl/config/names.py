"""Dotted names of sections, and the names of estimators, losses and reward managers.

The names of functions stand here because the configuration is checked before torch and the modules of these functions
are imported; tests hold that those modules register exactly these. Each registry adds the names of a user's file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Sections and keys that several checks and messages name.
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
HYBRID = "actor_rollout_ref.hybrid_engine"
JUDGE = "reward_model.judge"
CORRECTION = "algorithm.rollout_correction"
IMPORT_FILES = "trainer.import_files"
# Implementations of FlashAttention that torch can call; parallel/flash_attention.py has the needs of each.
FLASH_ATTENTION_IMPLS = ("FA3", "FA4")


class RegisteredNames:
    """The names that a key may be set to.  kind: what a name stands for, for messages."""

    def __init__(self, kind: str, key: str, own: Iterable[str]) -> None:
        self.kind, self.key = kind, key
        self.own = tuple(own)
        self._names = set(self.own)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        self._names.add(name)

    def forget(self, name: str) -> None:
        self._names.discard(name)

    def unknown(self, name: str) -> str:
        """The violation of a user who wrote this name, which nobody registered."""
        # Of these short names each letter counts: gdpo is another estimator than grpo.
        same_letters = [known for known in sorted(self._names) if sorted(known) == sorted(str(name))]
        near = same_letters or difflib.get_close_matches(str(name), sorted(self._names), n=1, cutoff=0.85)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return (
            f"{self.key}={name!r}: no such {self.kind}; known are {', '.join(sorted(self._names))}.{hint} One of your "
            f"own: name the file that registers it in {IMPORT_FILES}"
        )


# The estimator whose reference model is a teacher.
DISTILLATION = "on_policy_distillation"
# Estimators whose baseline is the other samples of the same prompt.
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
ESTIMATORS = RegisteredNames(
    "advantage estimator",
    "algorithm.adv_estimator",
    ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax", DISTILLATION),
)
# Estimators that read a critic's values.
CRITIC_ESTIMATORS = {"gae"}
# Policy losses and estimators that read the reference's log-probs.
REFERENCE_LOSSES: set[str] = set()
REFERENCE_ESTIMATORS = {DISTILLATION}
POLICY_LOSSES = RegisteredNames(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    ("vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov"),
)
REWARD_MANAGERS = RegisteredNames("reward manager", "reward_model.reward_manager", ("naive", "batch", "dapo", "prime"))
