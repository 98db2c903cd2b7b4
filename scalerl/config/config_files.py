"""`ConfigFiles`: the YAML files and groups of a command, which Hydra finds, orders and reads."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import OmegaConf

from scalerl.config.schema import SCHEMAS
from scalerl.config.written import texts_of_yaml

CONFIGS_PACKAGE = "scalerl.configs"
SCHEMA_END = "_schema"
# verl's primary files. A defaults list may name them: they stand for its defaults, and are empty here.
FILES_OF_VERL = re.compile(
    r"(_generated_)?(ppo|dapo|sft|multiturn_grpo|gsm8k_multiturn\w*)(_megatron|_fsdp|_veomni)?_trainer\w*"
)
# The beginning of the names of scalerl's recipes for a command; those of `scalerl train` have none.
RECIPES_OF = {"sft": "sft_", "generation": "generate_"}

# The schema of a command is a node of Hydra's, with which the defaults list of the command's file begins.
for _kind, _schema in SCHEMAS.items():
    ConfigStore.instance().store(name=f"{_kind}{SCHEMA_END}", node=_schema)


@dataclass(frozen=True)
class ConfigNode:
    """A node of a composition.

    origin: its file, or its name in Hydra's store.  package: the section that its keys start at; "" is the root.
    texts: the content with numbers and booleans as they were written.
    """

    name: str
    origin: str
    package: str
    content: dict[Any, Any]
    texts: dict[Any, Any]


class ConfigFiles:
    """The nodes that a command line may name: those of the user's directory, then scalerl's own and Hydra's store."""

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        """Takes the kind of the configuration, and the directory of --config-dir."""
        self._kind, self._directory = kind, directory
        Plugins.instance()
        path = ConfigSearchPathImpl()
        path.append("hydra", "pkg://hydra.conf")
        if directory is not None:
            path.append("user", f"file://{directory}")
            self._add_files_of_verl(directory)
        path.append("scalerl", f"pkg://{CONFIGS_PACKAGE}")
        path.append("schema", "structured://")
        self._loader = ConfigLoaderImpl(path)
        self._results: dict[tuple[str, ...], Any] = {}

    @staticmethod
    @functools.cache
    def of_package(kind: str) -> ConfigFiles:
        """The files of a command without a directory of the user's."""
        return ConfigFiles(kind)

    @staticmethod
    def _add_files_of_verl(directory: Path) -> None:
        for path in directory.glob("*.yaml"):
            for word in set(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace"))):
                if FILES_OF_VERL.fullmatch(word):
                    ConfigStore.instance().store(name=word, node={})

    def names(self) -> list[str]:
        """The files that --config-name may name."""
        found = self._loader.repository.get_group_options("", ObjectType.CONFIG)
        internal = re.compile(rf"_.*|.*{SCHEMA_END}|{FILES_OF_VERL.pattern}")
        return sorted(name for name in found if not internal.fullmatch(name))

    def groups(self) -> list[str]:
        """The groups that `group=option` may name."""
        found = self._loader.repository.get_group_options("", ObjectType.GROUP)
        return [name for name in found if name != "hydra"]

    def options(self, group: str) -> list[str]:
        """The options of a group, without scalerl's own for other commands."""
        own = resources.files(CONFIGS_PACKAGE).joinpath(group)
        names = self._loader.repository.get_group_options(group, ObjectType.CONFIG)
        return sorted(name for name in names if self._fits(name) or not own.joinpath(f"{name}.yaml").is_file())

    def _fits(self, name: str) -> bool:
        if self._kind in RECIPES_OF:
            return name.startswith(RECIPES_OF[self._kind])
        return not name.startswith(tuple(RECIPES_OF.values()))

    def chosen_groups(self, name: str) -> set[str]:
        """The groups in the defaults list of a file. Raises as `nodes`."""
        return set(self._found(name).overrides.known_choices)

    def nodes(self, name: str, groups: Sequence[str]) -> list[ConfigNode]:
        """The nodes of a composition, in the order in which they apply, without the schema.

        groups: overrides of the defaults list, as Hydra takes them.  Raises the errors of Hydra, OmegaConf and YAML.
        """
        return list(self._nodes(name, groups))

    def _nodes(self, name: str, groups: Sequence[str]) -> Iterator[ConfigNode]:
        for default in self._found(name, *groups).defaults:
            path = default.config_path or ""
            if path.startswith("hydra/") or path.endswith(SCHEMA_END):
                continue
            loaded = self._loader.repository.load_config(path)
            content = {} if loaded is None else OmegaConf.to_container(loaded.config, resolve=False)
            assert isinstance(content, dict), "Hydra reads mappings alone"
            file, texts = self._file(path), None
            if file is not None:
                texts = texts_of_yaml(file.read_text(encoding="utf-8"))
            texts = texts if isinstance(texts, dict) else content
            yield ConfigNode(path, path if file is None else str(file), default.package or "", content, texts)

    def _found(self, name: str, *groups: str) -> Any:
        """Hydra's result for a defaults list."""
        if self._directory is not None:
            return self._loader.compute_defaults_list(name, list(groups), RunMode.RUN)
        # The files of the package never change.
        if (name, *groups) not in self._results:
            self._results[name, *groups] = self._loader.compute_defaults_list(name, list(groups), RunMode.RUN)
        return self._results[name, *groups]

    def _file(self, path: str) -> Any:
        roots = [*([] if self._directory is None else [self._directory]), resources.files(CONFIGS_PACKAGE)]
        files = (root.joinpath(f"{path}.yaml") for root in roots)
        return next((file for file in files if file.is_file()), None)
