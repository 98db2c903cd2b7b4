"""The shapes of the models of a run, from their config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from scalerl.config import ConfigError, PPOConfig, SFTConfig, model_roles
from scalerl.config.errors import ErrorCollector
from scalerl.data.model_source import model_directory
from scalerl.models import Head, ModelShape


def _shape(path: str, key: str) -> ModelShape:
    """The shape of a model, by the path of a config.json, or as `model_directory` finds it.  Raises ValueError."""
    file = Path(path)
    if file.suffix == ".json" and file.is_file():
        return ModelShape.from_config(json.loads(file.read_text(encoding="utf-8")))
    return ModelShape.from_hf(model_directory(path, key, config_alone=True))


def shapes_of(cfg: PPOConfig | SFTConfig) -> Mapping[str, ModelShape]:
    """The shape of each role's model, with the head of the role; config.json alone is read, no weights.

    Raises ConfigError for models that cannot be read.
    """
    paths: dict[str, tuple[str, str, Head]] = {}
    if isinstance(cfg, SFTConfig):
        paths["actor"] = (cfg.model.path, "model.path", "lm")
    else:
        paths["actor"] = (cfg.actor_rollout_ref.model.path, "actor_rollout_ref.model.path", "lm")
        for role in model_roles(cfg):
            paths[role.name] = (str(role.model_path), role.model_key, role.head)
    from scalerl.trainer.checks.models import seeing_shape, trained_shape

    shapes, violations = {}, []
    for name, (path, key, head) in paths.items():
        if name != "actor" and path == paths["actor"][0] and "actor" not in shapes:
            # It has been said of the actor's.
            continue
        try:
            shapes[name] = seeing_shape(cfg, _shape(path, key).with_head(head))
        except ValueError as error:
            violations.append(str(error) if str(error).startswith(key) else f"{key} = {path}: {error}")
    errors = ErrorCollector()
    shapes |= {name: trained_shape(errors, cfg, shapes[name], name) for name in ("actor", "critic") if name in shapes}
    if violations := [*dict.fromkeys(violations), *errors.violations]:
        raise ConfigError(violations)
    return shapes
