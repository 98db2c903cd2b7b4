"""`PartialConfig`, a configuration being filled in: each value is checked against the schema, all errors are kept."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalerl.config.foreign_keys import Translation, translator
from scalerl.config.keys import defaults_of, key_table, raw_defaults
from scalerl.config.value_checks import show
from scalerl.config.written import as_text, misread, texts_of_override

# Dicts whose entries are checked one by one.
OVERRIDES = ("override_transformer_config", "override_ddp_config", "override_optimizer_config")
# A text inside the domain of every key that has no default.
PLACEHOLDER = "missing.parquet"


class PartialConfig:
    """The values of a configuration that is being filled in, and a violation for each that did not fit its schema."""

    def __init__(self, schema: type, kind: str = "ppo", left_open: Mapping[str, str] | None = None) -> None:
        """Starts from the defaults of `schema`.

        kind: of a configuration, whose vocabulary of verl is understood.
        left_open: key -> text that a shell replaces by its value; None: no shell reads what is put.
        """
        self.table = key_table(schema)
        self.violations: list[str] = []
        # Keys and sections whose value may be another than the user meant; "" stands for all keys. Complete after
        # `finish`.
        self.wrong: set[str] = set()
        # What became of verl's keys; complete after `finish`.
        self.translations: list[Translation] = []
        self._verl = translator(kind)
        # Entries of inherited dicts: dict -> key in it -> value.
        self._own_entries: dict[str, dict[str, Any]] = {}
        self._raw_defaults = raw_defaults(schema)
        self._config = copy.deepcopy(defaults_of(schema))
        self._mentioned: set[str] = set()
        self._written: set[str] = set()
        # Keys, of verl's too, -> their values with the numbers and booleans as they were written.
        self._texts: dict[str, Any] = {}
        self._left_open = None if left_open is None else dict(left_open)

    def put_override(self, override: Override) -> None:
        """Takes one `key=value` of a command line."""
        if override.is_delete():
            key = override.key_or_group
            advice = "give it a value" if self.table.kind(key) != "unknown" else self.table.unknown(key)
            self._reject(key, f"{override.input_line}: a key cannot be deleted; {advice}")
        elif override.package is not None:
            self._reject("", f"{override.input_line}: there is no group {override.key_or_group}")
        else:
            key, value = override.key_or_group, override.value()
            self._keep_texts(key, value if isinstance(value, str) else texts_of_override(override.input_line or ""))
            self.put(key, value)

    def put_tree(self, package: str, content: dict[Any, Any], texts: dict[str, Any], origin: str) -> None:
        """Takes the content of a YAML file whose keys start at `package` ("" is the root).

        texts: the same with numbers and booleans as they were written (`texts_of_yaml`).
        """
        self._keep_texts(package, texts)
        at_root = all(self.table.kind(str(name)) != "unknown" for name in content)
        if package and self.table.kind(package) == "unknown" and at_root:
            self._reject(
                "",
                f"{package}: no such key{origin}; make '# @package _global_' the first line of the file, so that its "
                "keys start at the root",
            )
            return
        for name, value in content.items():
            self.put(f"{package}.{name}" if package else str(name), value, origin)

    def _keep_texts(self, key: str, texts: Any) -> None:
        self._texts[key] = texts
        if isinstance(texts, dict):
            for name, inner in texts.items():
                self._keep_texts(f"{key}.{name}" if key else str(name), inner)

    def put(self, key: str, value: Any, origin: str = "") -> None:
        """Sets `key`, or every key below it when it is a section; a key of verl is read in `finish`."""
        kind = self.table.kind(key)
        if kind in ("unknown", "free") and self._verl.knows(key, value, self):
            self._verl.add(key, value, origin)
        elif isinstance(value, dict) and value and (kind == "unknown" or self._is_overrides(key)):
            self._put_inner(key, value, origin)
        elif kind == "unknown":
            self._reject(key, self.table.unknown(key, origin))
        elif kind != "section":
            written = self.as_written(key, value, key)
            if (other := misread(written, self._texts.get(key))) is not None:
                text, read = other
                self._reject(key, f"{key} = {text}: is {read} in YAML{origin}; write {read}, or '{text}' in quotes")
            self._put_own(key, written, value, origin)
        elif isinstance(value, dict):
            for name, inner in value.items():
                self.put(f"{key}.{name}", inner, origin)
        elif self._verl.knows(key, value, self):
            self._verl.add(key, value, origin)
        else:
            keys = ", ".join(f"{key}.{child}" for child in self.table.children(key))
            self._reject(key, f"{key} = {show(value)}: is a section{origin}; set one of {keys}")

    def _put_own(self, key: str, written: Any, value: Any, origin: str) -> None:
        """Sets a key of scalerl's own; verl's vocabulary is asked about a text, and a value that it cannot have."""
        violation, leaf = self._put_leaf(key, written, origin), self.table.leaves.get(key)
        is_asked = violation is not None or (leaf is not None and (leaf.is_text or not leaf.allows(self.value(key))))
        if is_asked and self._verl.knows(key, value, self):
            OmegaConf.update(self._config, key, self._raw_defaults[key])
            self._written.discard(key)
            self._verl.add(key, value, origin)
        elif violation:
            self._mentioned.add(key)
            self._reject(key, violation)

    def _reject(self, key: str, violation: str) -> None:
        """Adds a violation by which `key`, or the key that it is a misspelling of, has not got its value."""
        self.violations.append(violation)
        self.doubt(key)

    def doubt(self, key: str) -> None:
        """Notes that `key`, or the key that it is a misspelling of, may have another value than the user meant."""
        meant = key if not key or self.table.kind(key) != "unknown" else self.table.nearest(key)
        if meant is not None:
            self.wrong.add(meant)

    def _put_inner(self, key: str, value: dict[Any, Any], origin: str) -> None:
        if self.table.kind(key) != "unknown" or any(self._is_known(f"{key}.{name}", value[name]) for name in value):
            for name, inner in value.items():
                self.put(f"{key}.{name}", inner, origin)
        else:
            self._reject(key, self.table.unknown(key, origin))

    def _is_known(self, key: str, value: Any) -> bool:
        if self.table.kind(key) != "unknown" or self._verl.knows(key, value, self):
            return True
        return isinstance(value, dict) and any(self._is_known(f"{key}.{name}", value[name]) for name in value)

    def _is_overrides(self, key: str) -> bool:
        return self.table.kind(key) == "leaf" and key.rpartition(".")[2] in OVERRIDES

    # What verl's vocabulary asks of the rest of the configuration.

    def value(self, key: str) -> Any:
        """The present value of a key; None where it cannot be resolved."""
        with contextlib.suppress(OmegaConfBaseException):
            return OmegaConf.select(self._config, key)
        return None

    def is_set(self, key: str) -> bool:
        """Whether a value was put for this key."""
        return key in self._written

    def left_open(self, key: str) -> str | None:
        """The text that a shell replaces by the value of a key, or of the key that it refers to; None if none does."""
        while self._left_open and key not in self._left_open:
            source = re.fullmatch(r"\$\{([\w.]+)\}", str(_raw_values(self._config, [key])[key]))
            if source is None:
                return None
            key = source[1]
        return self._left_open[key] if self._left_open else None

    @property
    def set_keys(self) -> frozenset[str]:
        """All keys that a value was put for."""
        return frozenset(self._written)

    def resolved(self, value: Any) -> Any:
        """The value that a reference to other keys stands for; the text itself where it cannot be resolved."""
        if isinstance(value, str) and "${" in value:
            with contextlib.suppress(OmegaConfBaseException):
                return OmegaConf.create({"it": value}, parent=self._config).it
        return value

    def as_written(self, key: str, value: Any, source: str) -> Any:
        """The value for a key, with the characters that were written for the key `source` where it holds text."""
        return as_text(value, self._texts.get(source, value)) if self.table.is_text(key) else value

    def _translate(self) -> None:
        for translation, values in self._verl.translations(self):
            self.translations.append(translation)
            if translation.verdict == "refused":
                self.violations.append(translation.violation)
            for key, value in values.items():
                if violation := self._put_leaf(key, value, translation.origin):
                    self._reject(key, violation)

    def _fill_inherited_dicts(self) -> None:
        for key, own in self._own_entries.items():
            source = OmegaConf.select(self._config, self.table.inherited[key])
            merged = OmegaConf.merge(OmegaConf.create(source), OmegaConf.create(own))
            OmegaConf.update(self._config, key, merged, merge=False)

    def finish(self) -> tuple[list[str], Any]:
        """Returns (violations of missing or unresolvable values, the configuration as a dataclass).

        The instance holds a placeholder where a value is missing, and the default where it could not be resolved.
        """
        self._translate()
        self._fill_inherited_dicts()
        problems = []
        raw = _raw_values(self._config, self.table.leaves)
        for key in [key for key, value in raw.items() if value == MISSING]:
            if key not in self._mentioned:
                problems.append(f"{key}: missing; set {key}=...")
            OmegaConf.update(self._config, key, PLACEHOLDER)
        # The keys are resolved one by one only where one is wrong: there are a hundred.
        with contextlib.suppress(OmegaConfBaseException):
            return problems, OmegaConf.to_object(self._config)
        for key in [key for key, value in raw.items() if "${" in str(value)]:
            try:
                OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.select(self._config, key)}), resolve=True)
            except OmegaConfBaseException as error:
                self.wrong.add(key)
                problems.append(f"{key} = {raw[key]}: cannot be resolved: {_first_line(error)}; set {key} to a value")
                default = self._raw_defaults[key]
                OmegaConf.update(self._config, key, PLACEHOLDER if default == MISSING else default)
        return problems, OmegaConf.to_object(self._config)

    def _put_leaf(self, key: str, value: Any, origin: str) -> str | None:
        """Gives a known key its value. Returns the violation of a value that is not of the key's type."""
        self._written.add(key)
        source = next((name for name in self.table.inherited if key.startswith(name + ".")), None)
        if source is not None:
            # An update would write into the dict that it is inherited from.
            self._own_entries.setdefault(source, {})[key.removeprefix(source + ".")] = value
            return None
        try:
            OmegaConf.update(self._config, key, value, merge=True)
        except (OmegaConfBaseException, ValueError) as error:
            if self._left_open is not None and "$" in str(value):
                self._left_open[key] = str(value)
            leaf = self.table.leaves.get(key)
            expected = _first_line(error) if leaf is None else f"must be {leaf.type_text}"
            return f"{key} = {show(value)}: wrong type{origin}, {expected}{self._instead(key)}"
        return None

    def _instead(self, key: str) -> str:
        if key not in self.table.leaves:
            return ""
        default = self._raw_defaults[key]
        return "" if default == MISSING else f"; the default is {show(default)}"


def _raw_values(config: Any, keys: Iterable[str]) -> dict[str, Any]:
    """The values of the keys as they were written: interpolations and ??? stay."""
    container: Any = OmegaConf.to_container(config, resolve=False)
    return {key: functools.reduce(lambda node, part: node[part], key.split("."), container) for key in keys}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
