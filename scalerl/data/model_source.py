"""Model directories from what `model.path` may be: a directory, a name on the Hugging Face hub, or a URL."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from scalerl.base.files import CONFIG_NAME, FETCHED
from scalerl.data.hub import HubError, fetch_from_hub, hub_name
from scalerl.data.local_copy import copy_to_local, is_remote
from scalerl.errors import UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")
# (path, key) -> the error, for later checks of the same model.
_failures: dict[tuple[str, str], ModelSourceError] = {}


class ModelSourceError(UserError):
    """Raised when a model is no directory and cannot be fetched."""


def model_directory(path: str, key: str, *, config_alone: bool = False) -> str:
    """Returns the local directory of a model, after fetching the model if `path` is no directory.

    path: a directory, with ~ for the user's; ORGANISATION/NAME or hf://ORGANISATION/NAME, with @REVISION or without, or
        its page, of the Hugging Face hub (HF_ENDPOINT: another); or a directory at a URL that `copy_to_local` knows.
    key: the key of the configuration, or the argument of the command, for messages.
    config_alone: only config.json is fetched.
    Models from the hub are kept in its cache (HF_HOME), where processes wait for each other and an interrupted download
    continues; large files are compared with the SHA-256 that the hub states.
    Raises ModelSourceError, or the DataError of a URL.
    """
    if os.path.isdir(directory := os.path.expanduser(path)):
        return directory
    if (failure := _failures.get((path, key))) is not None:
        raise failure
    if (named := hub_name(path, "model")) is not None:
        try:
            return _from_hub(*named, [CONFIG_NAME] if config_alone else FETCHED, setting=f"{key} = {path}")
        except ModelSourceError as error:
            _failures[path, key] = error
            raise
    if is_remote(path):
        if config_alone:
            return str(Path(copy_to_local(f"{path.rstrip('/')}/{CONFIG_NAME}")).parent)
        return copy_to_local(path, verbose=True)
    raise ModelSourceError(
        f"{key} = {path}: there is no such directory (working directory {Path.cwd()}); give one with config.json, "
        "*.safetensors and tokenizer files, a name on the Hugging Face hub (ORGANISATION/NAME), or a URL"
    )


def fetch_models(cfg: Any, attempt: Callable[[Callable[[], str]], str | None]) -> None:
    """Replaces the hub name or URL of every model in a configuration by its local directory.

    attempt: calls a function that may raise, and returns None if it raised.
    """
    _failures.clear()
    # Roles often begin as the same model.
    fetched: dict[str, str | None] = {}
    for section, name, key in model_keys(cfg):
        path = getattr(section, name)
        if path not in fetched:
            fetched[path] = attempt(lambda path=path, key=key: model_directory(path, key))
        if (directory := fetched[path]) is not None and directory != path:
            print(f"{key}: {path} is in {directory}", flush=True)
            setattr(section, name, directory)


def model_keys(cfg: Any, prefix: str = "") -> Iterator[tuple[Any, str, str]]:
    """Yields (section, field, key) of every model that a configuration names."""
    for field in fields(cfg):
        value, key = getattr(cfg, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from model_keys(value, f"{key}.")
        elif isinstance(value, str) and (key.endswith("model.path") or field.name == "model_path"):
            yield cfg, field.name, key


def _from_hub(repo: str, revision: str | None, files: Sequence[str], setting: str) -> str:
    try:
        directory = fetch_from_hub(repo, revision, "model", files, setting=setting)
    except HubError as error:
        raise ModelSourceError(str(error)) from error
    _check_bytes(directory, setting)
    return str(directory)


def _check_bytes(snapshot: Path, setting: str) -> None:
    """Compares large files with the hub's SHA-256, which is their name in its cache.

    Each file is compared once: a file NAME.checked beside it marks it as compared.
    """
    for path in sorted(snapshot.rglob("*.safetensors")):
        blob = path.resolve()
        mark = blob.with_name(f"{blob.name}.checked")
        if not _SHA256.fullmatch(blob.name) or mark.exists():
            continue
        with open(blob, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != blob.name:
            raise ModelSourceError(
                f"{setting}: {path.name} has the SHA-256 {digest}, the hub says {blob.name}; remove {blob} and start "
                "again"
            )
        mark.touch()
