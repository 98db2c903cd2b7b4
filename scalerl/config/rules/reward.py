"""Rules of the reward managers."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl.config.registered_names import REWARD_MANAGERS
from scalerl.config.rules.base import rule
from scalerl.config.schema import PPOConfig

_BUFFER = "reward_model.overlong_buffer"


@rule(REWARD_MANAGERS.key)
def _overlong_buffer_is_read(cfg: PPOConfig) -> Iterator[str]:
    # A manager of the user's own may read these keys.
    name = cfg.reward_model.reward_manager
    if cfg.reward_model.overlong_buffer.enable and name in REWARD_MANAGERS.own and name != "dapo":
        yield (
            f"{_BUFFER}.enable = true: has no effect when {REWARD_MANAGERS.key} = {name}; set "
            f"{REWARD_MANAGERS.key}=dapo, or {_BUFFER}.enable=false"
        )


REWARD_RULES = [_overlong_buffer_is_read]
