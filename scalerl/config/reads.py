"""`recording_reads`, a configuration that notes which of its keys are read: what a rule between keys depends on."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, TypeVar

Config = TypeVar("Config")
# Names, in an instance, of the set that its reads go to and of the dotted key of its section.
_READS, _PREFIX = "_scalerl_reads", "_scalerl_prefix"


def recording_reads(config: Config, reads: set[str]) -> Config:
    """Returns a copy of a config dataclass that adds the dotted key of each value to `reads` when it is read.

    The copy has the values of the original, and an instance of each of its classes.
    """
    return _recording(config, reads, "")


def _recording(config: Any, reads: set[str], prefix: str) -> Any:
    recorder = copy.copy(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(section := getattr(config, field.name)):
            setattr(recorder, field.name, _recording(section, reads, f"{prefix}{field.name}."))
    recorder.__class__ = _recording_class(type(config))
    vars(recorder).update({_READS: reads, _PREFIX: prefix})
    return recorder


@functools.cache
def _recording_class(schema: type) -> type:
    """A subclass of a config dataclass. One for all its sections, which would else be unequal to each other."""
    names = {field.name for field in dataclasses.fields(schema)}

    def __getattribute__(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not dataclasses.is_dataclass(value):
            own = object.__getattribute__(self, "__dict__")
            # `dataclasses.replace` makes an instance without them, from values that were read for it.
            if _READS in own:
                own[_READS].add(own[_PREFIX] + name)
        return value

    return type(schema.__name__, (schema,), {"__getattribute__": __getattribute__})
