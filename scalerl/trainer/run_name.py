"""Names a run that has no name: by model, data, time and its keys, by which the same command finds it again."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Literal

from scalerl.config import PPOConfig, SFTConfig, flatten
from scalerl.config.compose import Composed, composed
from scalerl.config.save import RESOLVED_CONFIG, saved_value
from scalerl.config.schema.trainer import AUTO_NAME

_KEY = "trainer.experiment_name"
_TIME = "%Y%m%d-%H%M%S"
# Keys of `trainer` that change what is learned. Other keys may change: a run continues with more steps or devices.
_LEARNING = ("trainer.critic_warmup", "trainer.max_staleness", "trainer.custom_fit.")
_MAX_PART = 40


def named(kind: Literal["ppo", "sft"], overrides: Sequence[str]) -> tuple[Composed, list[str]]:
    """Composes the configuration of a run that has a name, without the rules between keys.

    Returns it and the override that it needs in addition to the user's: the name, where trainer.experiment_name is
    auto. It is the name of the newest run with the same keys, if there is one. Raises ConfigError.
    """
    composition = composed(kind, overrides, rules=False)
    if composition.config.trainer.experiment_name != AUTO_NAME:
        return composition, []
    beginning, end = _without_time(composition)
    new = f"{beginning}-{time.strftime(_TIME)}-{end}"
    named = composed(kind, [*overrides, f"{_KEY}={new}"], rules=False)
    run_dir = named.config.trainer.default_local_dir
    before, has_name, _ = run_dir.partition(new)
    if has_name:
        # The time, a text of this length, is the only part that is not known.
        pattern = glob.escape(run_dir).replace(new, f"{beginning}-????????-??????-{end}")
        names = sorted(path[len(before) :][: len(new)] for path in glob.glob(pattern))
        name = names[-1] if names else new
    else:
        name = saved_value(Path(run_dir) / RESOLVED_CONFIG, _KEY) or new
    own = [f"{_KEY}={name}"]
    if name != new:
        named = composed(kind, [*overrides, *own], rules=False)
    says = f"{_KEY} = {name}, as no name is given"
    return replace(named, set_keys=composition.set_keys, lines=(*named.lines, says)), own


def run_directory(kind: Literal["ppo", "sft"], overrides: Sequence[str]) -> str:
    """The directory of a run, without the time in a name that `named` gives. Raises ConfigError."""
    composition = composed(kind, overrides, rules=False)
    trainer = composition.config.trainer
    if trainer.experiment_name != AUTO_NAME:
        return trainer.default_local_dir
    return trainer.default_local_dir.replace(AUTO_NAME, "-".join(_without_time(composition)))


def _without_time(composition: Composed) -> tuple[str, str]:
    """What is in front of the time in a name, model and data, and behind it, a digest of the keys that were set."""
    cfg: PPOConfig | SFTConfig = composition.config
    model = cfg.model if isinstance(cfg, SFTConfig) else cfg.actor_rollout_ref.model
    files = cfg.data.train_files
    parts = [PurePath(model.path).name, _data_name(files if isinstance(files, str) else files[0])]
    parts += ["sft"] if isinstance(cfg, SFTConfig) else []
    given = tuple(
        f"{key}." for key in composition.set_keys if not key.startswith("trainer.") or key.startswith(_LEARNING)
    )
    keys = {key: value for key, value in flatten(cfg).items() if f"{key}.".startswith(given)}
    digest = hashlib.sha256(json.dumps([parts, keys], sort_keys=True).encode()).hexdigest()[:6]
    return "-".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part)[:_MAX_PART].strip("-.") or "x" for part in parts), digest


def _data_name(file: str) -> str:
    """The name of a data file; that of its folder where the file is called train or the like."""
    path = PurePath(file)
    return path.parent.name if re.match(r"(train|test|val)", path.stem) and path.parent.name else path.stem
