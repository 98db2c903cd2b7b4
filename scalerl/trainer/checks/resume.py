"""The check of the checkpoint that a run resumes from: it is whole, and has the run's models, tokenizer and prompts."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.checkpoint.mirror import Mirror
from scalerl.config import PPOConfig, SFTConfig
from scalerl.config.errors import ErrorCollector
from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.tracking.backend import safe_uri
from scalerl.trainer.checks.models import policy_model, trained_models
from scalerl.trainer.console_texts import run_directory_violation
from scalerl.trainer.saving.checkpoints import Resumed, check_same_model, find_resume_point

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scalerl.data import PromptTable, RLHFDataset, SFTDataset


def check_resume(
    errors: ErrorCollector,
    cfg: PPOConfig | SFTConfig,
    shapes: Mapping[str, ModelShape],
    train: RLHFDataset | PromptTable | SFTDataset | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    digests: bool,
    fetches: bool = False,
    passed_over: Mapping[Path, str] | None = None,
) -> Resumed | None:
    """Finds the checkpoint to resume from, and checks that it has the models, tokenizer and prompts of the run.

    shapes: by role, of the models that could be read.  passed_over: as `find_resume_point`.
    fetches: a newer one of trainer.checkpoint_mirror is fetched; else it is only looked whether the mirror answers,
    since another run may be writing to the directory: the run that has locked the directory looks again.
    """
    from scalerl.data import PromptCursor

    trainer = cfg.trainer
    if (violation := run_directory_violation(trainer.default_local_dir)) is not None:
        errors.violations.append(violation)
        return None
    mirror = trainer.checkpoint_mirror
    if mirror is not None and errors.attempt(lambda: _open_mirror(mirror)) is None:
        return None
    find = partial(
        find_resume_point,
        trainer.default_local_dir,
        trainer.resume_mode,
        trainer.resume_from_path,
        digests=digests,
        mirror=mirror if fetches else None,
        passed_over=passed_over,
    )
    is_asked_later = mirror is not None and trainer.resume_mode == "auto" and digests and not fetches
    resumed = _found_before_a_fetch(find) if is_asked_later else errors.attempt(find)
    if resumed is None or resumed.directory is None:
        return resumed
    for role, path in trained_models(cfg).items():
        if role in shapes:
            errors.attempt(partial(check_same_model, resumed, shapes[role], path, role))
    if tokenizer is not None:
        model, _ = policy_model(cfg)
        own = partial(check_same_tokenizer, trust_remote_code=model.trust_remote_code)
        errors.attempt(lambda: own(resumed, tokenizer, model.path))
    if train is not None:
        cursor = PromptCursor(len(train), cfg.data.seed, cfg.data.shuffle, train.digest)
        errors.attempt(lambda: cursor.load_state_dict(resumed.state["prompts"]))
    return resumed


def _open_mirror(url: str) -> Mirror:
    """The store of trainer.checkpoint_mirror. Raises UserError, naming the key, if it cannot be used."""
    try:
        return Mirror(url)
    except UserError as error:
        raise UserError(f"trainer.checkpoint_mirror = {safe_uri(url)}: {error}") from error


def _found_before_a_fetch(find: Callable[[], Resumed]) -> Resumed:
    """Returns what `find` returns; a fresh start where every checkpoint here is damaged: the mirror may have copies.

    The look that fetches says which checkpoints are damaged.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return find()
        except ValueError:
            return Resumed(None, {})


def check_same_tokenizer(
    resumed: Resumed, tokenizer: PreTrainedTokenizerBase, model_path: str, *, trust_remote_code: bool
) -> None:
    """Raises ValueError, with the differences, if the checkpoint's tokenizer makes other tokens than the run's.

    Its chat template may differ. A checkpoint without a tokenizer is not compared.
    """
    from scalerl.data import load_tokenizer

    assert resumed.directory is not None
    saved = resumed.directory / "actor" / "huggingface"
    if not (saved / "tokenizer_config.json").is_file() or _same_files(saved, Path(model_path)):
        return
    stored = load_tokenizer(saved, trust_remote_code)
    if different := list(_tokenizer_differences(stored, tokenizer)):
        raise ValueError(
            f"checkpoint {saved.parent} has another tokenizer than {model_path}: {'; '.join(different)}. Give the "
            "model that the run began with, another trainer.default_local_dir, or trainer.resume_mode=disable"
        )


def _same_files(saved: Path, model: Path) -> bool:
    """Whether the model has every saved file except weights unchanged, so that no tokenizer has to be loaded."""
    files = [file for file in saved.iterdir() if file.name not in ("config.json", "generation_config.json")]
    return all(
        (model / file.name).is_file() and (model / file.name).read_bytes() == file.read_bytes() for file in files
    )


def _tokenizer_differences(there: PreTrainedTokenizerBase, here: PreTrainedTokenizerBase) -> Iterator[str]:
    vocabularies = there.get_vocab(), here.get_vocab()
    changed = [
        (token, *(vocabulary.get(token, "none") for vocabulary in vocabularies))
        for token in vocabularies[0].keys() | vocabularies[1].keys()
        if vocabularies[0].get(token) != vocabularies[1].get(token)
    ]
    if changed:
        shown = ", ".join(
            f"{token!r} {id_there} there, {id_here} here" for token, id_there, id_here in sorted(changed)[:3]
        )
        yield f"{len(changed)} tokens have another id ({shown})"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(there, name) != getattr(here, name):
            yield f"{name} {getattr(there, name)} there, {getattr(here, name)} here"
    rules = [_tokenizer_rules(tokenizer) for tokenizer in (there, here)]
    if different := [name for name in rules[0].keys() | rules[1].keys() if rules[0].get(name) != rules[1].get(name)]:
        yield f"other {', '.join(sorted(different))}"


def _tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The parts of a fast tokenizer, except its vocabulary, that decide how text is split; {} for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    content = json.loads(backend.to_str())
    model = content["model"]
    return {name: content.get(name) for name in ("normalizer", "pre_tokenizer")} | {"merges": model.get("merges")}
