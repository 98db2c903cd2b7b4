"""Declares keys: `lr: float = key(1e-6, at_least(0))` gives a key its default and the values that it may have."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from scalerl.config.value_checks import Domain, show

_DOMAIN = "domain"
_TIMES = "times"


def key(default: Any, domain: Domain) -> Any:
    """A field with its default and its domain. A list or a dict as default is copied for each instance."""
    if not domain.example:
        domain = dataclasses.replace(domain, example=f"{default:g}" if isinstance(default, float) else show(default))
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={_DOMAIN: domain})
    return dataclasses.field(default=default, metadata={_DOMAIN: domain})


def same_as(source: str) -> Any:
    """Makes a default that is the value of another key."""
    return f"${{{source}}}"


def times(number: int, source: str) -> Any:
    """Makes a default that is a number times the value of another key."""
    return f"${{{_TIMES}:{number},${{{source}}}}}"


def times_text(default: Any) -> str | None:
    """The text of a default that `times` made, as a user reads it; None for any other default."""
    match = re.fullmatch(rf"\$\{{{_TIMES}:(\d+),\$\{{([\w.]+)\}}\}}", str(default))
    return None if match is None else f"{match[1]} x {match[2]}"


# A key that is out of its domain has a message of its own, without one about what follows from it.
OmegaConf.register_new_resolver(_TIMES, lambda number, other: number * max(1, other), replace=True)


@functools.cache
def domains_of(section: type) -> dict[str, Domain]:
    """Maps the name of each key of a section to its domain; a key that is a bool or a free dict has none.

    A key that a section declares again without a domain keeps that of the section that it extends.
    """
    domains: dict[str, Domain] = {}
    for cls in reversed(section.__mro__):
        for name, field in vars(cls).get("__dataclass_fields__", {}).items():
            if _DOMAIN in field.metadata:
                domains[name] = field.metadata[_DOMAIN]
    return domains


def domain_violations(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, violation) for every value of a config dataclass that is outside its domain."""
    domains = domains_of(type(config))
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        domain = domains.get(field.name)
        if dataclasses.is_dataclass(value):
            yield from domain_violations(value, name + ".")
        elif domain is not None and not domain.allows(value):
            yield name, f"{name} = {show(value)}: must be {domain.limit}; set for example {name}={domain.example}"
