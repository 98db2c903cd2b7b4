"""Files and names that a configuration names, looked up also where something else in it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from scalerl.base.user_code import import_file, import_files
from scalerl.config import PPOConfig, SFTConfig
from scalerl.config.compose import Composed, value_at
from scalerl.config.errors import ConfigError, ErrorCollector
from scalerl.config.names import ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS
from scalerl.config.partial_config import OVERRIDES, PLACEHOLDER
from scalerl.trainer.console_texts import run_directory_violation
from scalerl.trainer.run_name import named


def composed_run(kind: Literal["ppo", "sft"], overrides: Sequence[str]) -> Composed:
    """Composes the configuration of a run, with a name; an error comes with those of the files and names in it.

    Rules between keys are left to `preflight`, which checks them with files and models. Raises ConfigError.
    """
    try:
        return named(kind, overrides)[0]
    except ConfigError as error:
        if error.config is None:
            raise
        violations = [*error.violations, *look_up_violations(error.config)]
        raise ConfigError(list(dict.fromkeys(violations))) from None


def look_up_violations(cfg: PPOConfig | SFTConfig) -> list[str]:
    """What is wrong with the files and names in a configuration that has other mistakes: what preflight says of them.

    Files are looked for, but not read, and nothing is fetched: that waits for a configuration without mistakes.
    """
    errors = ErrorCollector()
    trainer = cfg.trainer
    if trainer.import_files:
        before = len(errors.violations)
        errors.attempt(lambda: import_files(trainer.import_files))
        if len(errors.violations) == before and isinstance(cfg, PPOConfig):
            errors.violations.extend(_unknown_names(cfg))
    if isinstance(cfg, PPOConfig) and (path := cfg.custom_reward_function.path) is not None:
        errors.attempt(lambda: import_file(path, "custom_reward_function.path"))
    _look_for_models(errors, cfg)
    _look_for_data(errors, cfg)
    _look_for_fields(errors, cfg)
    if (violation := run_directory_violation(trainer.default_local_dir)) is not None:
        errors.violations.append(violation)
    return errors.violations


def _unknown_names(cfg: PPOConfig) -> Iterator[str]:
    for names in (ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS):
        if value_at(cfg, names.key) not in names:
            yield names.unknown(value_at(cfg, names.key))


def _look_for_fields(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> None:
    if any(key.rpartition(".")[2] in OVERRIDES and value for key, value in _dicts(asdict(cfg))):
        # Imported here: it imports torch, and for fields megatron.
        from scalerl.trainer.checks.models import check_megatron_fields

        check_megatron_fields(errors, cfg)


def _dicts(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each dict in a tree of dicts, with its dotted key."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}", value
            yield from _dicts(value, f"{prefix}{name}.")


def _look_for_models(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> None:
    from scalerl.data.hub import hub_name
    from scalerl.data.local_copy import is_remote
    from scalerl.data.model_source import model_directory, model_keys

    paths: dict[str, str] = {}
    for section, name, key in model_keys(cfg):
        # Roles often begin as the same model.
        paths.setdefault(getattr(section, name), key)
    for path, key in paths.items():
        may_be_fetched = is_remote(path) or hub_name(path, "model") is not None
        if path != PLACEHOLDER and (Path(path).expanduser().is_dir() or not may_be_fetched):
            errors.attempt(lambda path=path, key=key: model_directory(path, key))


def _look_for_data(errors: ErrorCollector, cfg: PPOConfig | SFTConfig) -> None:
    from scalerl.data.files import resolve_files
    from scalerl.data.local_copy import is_remote

    for value in (cfg.data.train_files, cfg.data.val_files):
        files = [value] if isinstance(value, str) else value
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            continue
        if local := [file for file in files if not is_remote(file) and file != PLACEHOLDER]:
            errors.attempt(lambda local=local: resolve_files(local))
