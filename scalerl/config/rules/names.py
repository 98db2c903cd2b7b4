"""Rules of names that select a function, which a file of the user's own may register."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.registered_names import ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS, RegisteredNames
from scalerl.config.rules.base import Rule, rule, value_at
from scalerl.config.schema import PPOConfig
from scalerl.config.sections import IMPORT_FILES


def _name_rule(names: RegisteredNames) -> Rule:
    @rule(names.key, IMPORT_FILES)
    def is_known(cfg: PPOConfig) -> Iterator[str]:
        # Names that files of the user's own register are known once these are imported; the registry checks them then.
        if value_at(cfg, names.key) not in names and not cfg.trainer.import_files:
            yield names.unknown(value_at(cfg, names.key))

    return is_known


NAME_RULES = [_name_rule(names) for names in (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS)]
