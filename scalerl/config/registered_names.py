"""Names of estimators, losses and reward managers: scalerl's own, and those that files of the user's own register.

They stand here because the configuration is checked before torch and the modules of these functions are imported;
tests hold that those modules register exactly these. Each registry adds what a user's file registers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from scalerl.config.rules.base import Rule, value_at
from scalerl.config.schema import PPOConfig

_IMPORT_FILES = "trainer.import_files"


class RegisteredNames:
    """What a key may be set to. kind: what the names are."""

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
        """What to tell a user who wrote this name."""
        near = difflib.get_close_matches(str(name), self._names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return (
            f"{self.key}={name!r}: no such {self.kind}; known are {', '.join(sorted(self._names))}.{hint} One of your "
            f"own: name the file that registers it in {_IMPORT_FILES}"
        )


# Those whose baseline is the other samples of the same prompt.
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
ESTIMATORS = RegisteredNames(
    "advantage estimator", "algorithm.adv_estimator", ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")
)
# Those that read a critic's values.
CRITIC_ESTIMATORS = {"gae"}
POLICY_LOSSES = RegisteredNames(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    ("vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro", "clip_cov", "kl_cov"),
)
REWARD_MANAGERS = RegisteredNames("reward manager", "reward_model.reward_manager", ("naive", "batch", "dapo", "prime"))


def _is_known(names: RegisteredNames) -> Rule:
    def check(cfg: PPOConfig) -> Iterator[str]:
        # With files of the user's own it is known once they are imported; then the registry says it.
        if value_at(cfg, names.key) not in names and not cfg.trainer.import_files:
            yield names.unknown(value_at(cfg, names.key))

    return Rule((names.key, _IMPORT_FILES), check)


NAME_RULES = [_is_known(names) for names in (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS)]
