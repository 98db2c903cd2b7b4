"""The user's own files that a run reads, as a checkpoint keeps them: a run that goes on says which have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalerl.config import PPOConfig, SFTConfig
from scalerl.tracking.backend import flat_config

# Key of the trainer state with the digests: configuration key -> path -> SHA-256 of the text.
OWN_FILES = "own_files"
# Configuration keys that name such files. Data has checks of its own, a model is compared tensor by tensor.
KEYS = (
    "trainer.import_files",
    "trainer.custom_fit.path",
    "custom_reward_function.path",
    "reward_model.judge.prompt_path",
    "actor_rollout_ref.rollout.program.path",
    "data.custom_cls.path",
    "data.chat_template_path",
)


def own_files(cfg: PPOConfig | SFTConfig) -> dict[str, dict[str, str]]:
    """Maps each configuration key that names files to their paths, as configured, and the SHA-256 of their texts."""
    values = flat_config(asdict(cfg))
    digests = {key: _digests(values.get(key)) for key in KEYS}
    return {key: of_key for key, of_key in digests.items() if of_key}


def _digests(value: Any) -> dict[str, str]:
    paths = [] if value is None else [value] if isinstance(value, str) else list(value)
    files = {path: Path(path).expanduser() for path in paths}
    # What cannot be read has been refused, or is somebody else's to say.
    return {path: hashlib.sha256(file.read_bytes()).hexdigest() for path, file in files.items() if file.is_file()}


def changed_files(state: Mapping[str, Any], cfg: PPOConfig | SFTConfig) -> list[str]:
    """`key (path)` of each file with another text than the checkpoint's run began with.

    state: of the trainer. One that older versions saved has no files.
    """
    before = state.get(OWN_FILES, {})
    return [
        f"{key} ({path})"
        for key, digests in own_files(cfg).items()
        for path, digest in digests.items()
        if before.get(key, {}).get(path, digest) != digest
    ]
