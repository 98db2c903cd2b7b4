"""Data sets by their name on the Hugging Face hub: which files of a repository hold the rows of which split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from scalerl.commands.data.own_rows import NO_ROWS, OWN_SUFFIXES
from scalerl.commands.data.splits import split_of
from scalerl.data.files import DataFile
from scalerl.data.hub import HubError, fetch_from_hub, hub_name
from scalerl.data.local_copy import is_remote
from scalerl.data.problems import DataError

_CARD = "README.md"


@dataclass(frozen=True)
class HubSet:
    """A data set on the hub.  repo: ORGANISATION/NAME.  revision: a branch, a tag or a commit; None: main."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, path: str) -> HubSet | None:
        """Parses ORGANISATION/NAME[@REVISION], hf://datasets/ORGANISATION/NAME or its page; None for anything else.

        A bare name is a path where that exists, or the folder that it begins with, or where it ends like a data file.
        """
        named, has_scheme = hub_name(path, "dataset"), is_remote(path)
        if named is None:
            return None
        first = Path(path).expanduser().parts[0]
        if not has_scheme and (Path(first).exists() or PurePosixPath(path).suffix in OWN_SUFFIXES):
            return None
        return cls(*named)

    def files(self, argument: str, subset: str | None, suffixes: Sequence[str]) -> list[tuple[DataFile, str]]:
        """Fetches the files with the rows, and returns them with the split of each, sorted by name.

        argument: of the command, for messages.  subset: one of those that the data set's card (README.md) declares;
        None: the only one, or the one that it calls the default.  suffixes: of files that hold rows.
        Raises DataError for a data set that is not there, that has no such file or no such subset.
        """
        setting = f"{argument} {self.repo}" + (f"@{self.revision}" if self.revision else "")
        try:
            card = self._fetch([_CARD], setting) / _CARD
            text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
            declared = declared_files(text, subset, setting)
            directory = self._fetch([p for _, p in declared] or [f"*{suffix}" for suffix in suffixes], setting)
        except HubError as error:
            raise DataError([str(error)]) from error
        names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        names_and_splits = split_files([name for name in names if PurePosixPath(name).suffix in suffixes], declared)
        if not names_and_splits:
            raise DataError(
                [
                    f"{setting}: holds no file that ends in {', '.join(suffixes)}; for rows that a program of the "
                    f"data set makes, give the hub's own parquet files: {self.repo}@refs/convert/parquet"
                ]
            )
        return [(DataFile(f"{self.repo}/{name}", str(directory / name)), split) for name, split in names_and_splits]

    def _fetch(self, patterns: Sequence[str], setting: str) -> Path:
        absent = "there is no such file or folder"
        return fetch_from_hub(self.repo, self.revision, "dataset", patterns, setting=setting, absent=absent)


def declared_files(card: str, subset: str | None, setting: str) -> list[tuple[str | None, str]]:
    """The files of a subset that a data set's card declares: (split as it is called there, or None, their pattern).

    card: the text of README.md.  subset: None: the only subset, or the one that is the default.  Empty where the card
    declares no files.  Raises DataError, which begins with `setting`, for a subset that is not there or must be named.
    """
    chosen = _subset(_subsets(card), subset, setting)
    files, folder = chosen.get("data_files"), str(chosen.get("data_dir") or "").strip("/")
    if isinstance(files, Mapping):
        files = [{"split": split, "path": path} for split, path in files.items()]
    splits_and_patterns: list[tuple[str | None, str]] = []
    for entry in files if isinstance(files, list) else [files] if files else []:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else (None, entry)
        splits_and_patterns += [(split, str(path)) for path in (paths if isinstance(paths, list) else [paths])]
    if folder and not splits_and_patterns:
        splits_and_patterns = [(None, "*")]
    prefix = f"{folder}/" if folder else ""
    return [(split, prefix + pattern.removeprefix("./").replace("**/", "*")) for split, pattern in splits_and_patterns]


def split_files(names: Sequence[str], declared: Sequence[tuple[str | None, str]]) -> list[tuple[str, str]]:
    """The files that hold rows, each with its split, train or val: that which the card declares, else by its name.

    declared: as `declared_files` returns; files that it does not name are left out, if it names any.
    """
    names_and_splits = []
    for name in names:
        splits = [split for split, pattern in declared if fnmatchcase(name, pattern)]
        if (splits or not declared) and PurePosixPath(name).name not in NO_ROWS:
            names_and_splits.append((name, split_of((splits[0] if splits else None) or name)))
    return names_and_splits


def _subsets(card: str) -> dict[str, Mapping[str, Any]]:
    """The subsets that the front matter of a card declares, by name."""
    front = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        declared = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return {}
    configs = declared.get("configs") if isinstance(declared, dict) else None
    return {
        str(each["config_name"]): each for each in configs or [] if isinstance(each, dict) and "config_name" in each
    }


def _subset(subsets: Mapping[str, Mapping[str, Any]], wanted: str | None, setting: str) -> Mapping[str, Any]:
    """The subset of that name, or the one to take without a name; {} where none is declared and none is wanted."""
    if wanted is not None:
        if wanted not in subsets:
            there = f"there are {', '.join(subsets)}" if subsets else "its card declares none; leave --subset out"
            raise DataError([f"{setting}: has no subset {wanted}; {there}"])
        return subsets[wanted]
    usual = [name for name, each in subsets.items() if each.get("default") is True or name == "default"]
    if len(subsets) > 1 and not usual:
        names = list(subsets)
        raise DataError([f"{setting}: has the subsets {', '.join(names)}; take one, for example --subset {names[0]}"])
    return subsets[[*usual, *subsets][0]] if subsets else {}
