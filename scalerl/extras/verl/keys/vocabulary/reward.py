"""Keys of verl's sections of rewards."""

from __future__ import annotations

import re
from typing import Any

from scalerl.extras.verl.keys.entry import (
    Becomes,
    Context,
    Outcome,
    Refused,
    absent,
    computed,
    goes_with,
    renamed,
    same,
)
from scalerl.extras.verl.keys.vocabulary.words import NONE


def _reward_manager(_: re.Match[str], value: Any, __: Context) -> Outcome | None:
    if isinstance(value, dict):
        return None
    if isinstance(value, str) and "/" in value:
        return Refused("names a file; register the manager in a file of trainer.import_files (docs/extending.md)")
    return Becomes({"reward_model.reward_manager": value})


REWARD = [
    computed("reward.reward_manager(.name|)", "`reward_model.reward_manager`", "", _reward_manager),
    same(
        "reward.reward_manager.source|reward_model.reward_manager_source",
        "register",
        None,
        why="managers are registered",
    ),
    absent(
        "reward.reward_manager.module.**",
        None,
        why="managers are registered",
        instead="register yours in a file of trainer.import_files (docs/extending.md)",
    ),
    goes_with("reward_model.reward_loop_*", "reward_model.reward_manager"),
    renamed("reward.custom_reward_function.(path|name)", r"custom_reward_function.\1"),
    renamed("reward.custom_reward_function.reward_kwargs", "custom_reward_function.reward_kwargs"),
    renamed("reward.custom_reward_function.reward_kwargs.(**)", r"custom_reward_function.reward_kwargs.\1"),
    renamed(
        "(reward|reward_model).reward_kwargs.overlong_buffer_cfg.(enable|len|penalty_factor|log)",
        r"reward_model.overlong_buffer.\2",
    ),
    renamed("(reward|reward_model).reward_kwargs.max_resp_len", "reward_model.overlong_buffer.max_resp_len"),
    renamed("reward.overlong_buffer.(*)", r"reward_model.overlong_buffer.\1"),
    absent(
        "(reward|reward_model).reward_kwargs.**",
        why="managers take no arguments of one's own",
        instead="give them to your function with custom_reward_function.reward_kwargs",
    ),
    same("(reward|reward_model).num_workers", why="samples are scored as they come"),
    same(
        "(reward|reward_model).(launch_reward_fn_async|use_reward_loop|launch_reward_fn_sub_thread)",
        why="samples are scored as they come",
    ),
    absent(
        "(reward|reward_model).sandbox_fusion.url",
        *NONE,
        why="programs run in a sandbox on the rollout's node",
    ),
    goes_with("(reward|reward_model).sandbox_fusion.*", "sandbox_fusion.url"),
    renamed("reward.reward_model.enable", "reward_model.enable"),
    renamed("reward.reward_model.(model_path|model.path)|reward_model.model_path", "reward_model.model.path"),
    renamed(
        "(reward.reward_model|reward_model).(nnodes|n_gpus_per_node)",
        r"reward_model.resource_pool.\2",
        neutral=(0, None),
        why="devices of its own",
    ),
    same(
        "(reward.reward_model|reward_model).enable_resource_pool",
        why="reward_model.resource_pool.nnodes above 0 says it",
    ),
    same(
        "(reward.reward_model|reward_model).rollout.**",
        why="a model with a score head is computed by Megatron; a judge that writes has reward_model.judge.*",
    ),
    renamed("reward.reward_model.(*)", r"reward_model.\1"),
]
