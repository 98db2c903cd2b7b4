"""Declares keys and the relations between them: `key(default, domain)` makes a field, `@check(...)` marks a method.

lr: float = key(1e-6, at_least(0))
min_lr: float = key(0.0, at_least(0))

@check("lr", "min_lr")
def floor_below_peak(self, at: Place) -> Iterator[str]: ...
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, TypeVar

from omegaconf import OmegaConf

from scalerl.config.value_checks import Domain, show

_DOMAIN, _ONLY_WITH = "domain", "only_with"
_CHECKED_KEYS = "_checked_keys"
Method = TypeVar("Method", bound=Callable[..., Iterator[str]])


def key(default: Any, domain: Domain, only_with: str | None = None) -> Any:
    """A field with its default and its domain. A list or a dict as default is copied for each instance.

    only_with: `name=value` or `name=value|value` of another key in the section, without which a value other than the
    default has no effect and is refused.
    """
    if not domain.example:
        domain = dataclasses.replace(domain, example=f"{default:g}" if isinstance(default, float) else show(default))
    metadata = {_DOMAIN: domain, _ONLY_WITH: only_with}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Defaults that follow from other keys


def same_as(source: str) -> Any:
    """Makes a default that is the value of another key."""
    return f"${{{source}}}"


def times(number: int, source: str) -> Any:
    """Makes a default that is a number times the value of another key."""
    return f"${{times:{number},${{{source}}}}}"


def at_most(number: int, source: str) -> Any:
    """Makes a default that is the value of another key, and at most a number."""
    return f"${{at_most:{number},${{{source}}}}}"


def share(parts: int, source: str) -> Any:
    """Makes a default that is the value of another key divided by a number, and at least 1."""
    return f"${{share:{parts},${{{source}}}}}"


def by_value(source: str, values: tuple[str, ...], then: int | str, otherwise: int | str | None) -> Any:
    """Makes a default that depends on whether another key has one of the values."""
    other = "null" if otherwise is None else otherwise
    return f"${{by_value:${{{source}}},[{','.join(values)}],{then},{other}}}"


# A key that is out of its domain has its own violation, without one about a default that follows from the key.
OmegaConf.register_new_resolver("times", lambda number, other: number * max(1, other), replace=True)
OmegaConf.register_new_resolver("at_most", lambda number, other: max(1, min(number, other)), replace=True)
OmegaConf.register_new_resolver("share", lambda parts, other: max(1, other // parts), replace=True)
OmegaConf.register_new_resolver(
    "by_value", lambda value, values, then, otherwise: then if value in values else otherwise, replace=True
)
_FOLLOWING = (
    (re.compile(r"\$\{([\w.]+)\}"), "as {}"),
    (re.compile(r"\$\{times:(\d+),\$\{([\w.]+)\}\}"), "{} x {}"),
    (re.compile(r"\$\{at_most:(\d+),\$\{([\w.]+)\}\}"), "{1}, at most {0}"),
    (re.compile(r"\$\{share:(\d+),\$\{([\w.]+)\}\}"), "{1} / {0}"),
    (re.compile(r"\$\{by_value:\$\{([\w.]+)\},\[([^]]*)\],(\w+),(\w+)\}"), "{2} with {0} of {1}, else {3}"),
)


def following_text(default: Any) -> str | None:
    """The text of a default that follows from another key, as a user reads it; None for any other default."""
    for pattern, text in _FOLLOWING:
        if match := pattern.fullmatch(str(default)):
            return text.format(*match.groups())
    return None


# Checks


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a section in a configuration, as its checks need it.  `at("lr")` is the dotted name of a key.

    prefix: the start of the section's keys ("" at the root).
    device: cuda or cpu, of the machine that runs the configuration; None while it is not known.
    is_here: whether the checks run on that machine, whose installed packages count.
    wrong: keys and sections whose value is wrong, and may be another than the user meant; "" stands for all keys.
    """

    prefix: str = ""
    device: str | None = None
    is_here: bool = False
    wrong: frozenset[str] = frozenset()

    def __call__(self, name: str) -> str:
        return self.prefix + name

    def knows(self, *keys: str) -> bool:
        """Whether none of these keys, or of the keys in these sections, is wrong."""
        parents = {".".join(parts[:end]) for key in keys for parts in [key.split(".")] for end in range(len(parts) + 1)}
        sections = tuple(f"{key}." for key in keys)
        return parents.isdisjoint(self.wrong) and not any(key.startswith(sections) for key in self.wrong)


def check(*keys: str) -> Callable[[Method], Method]:
    """Marks a method of a section that yields a violation where the values of several keys do not go together.

    The method takes the `Place` of the section. It is called only where no value of `keys` is wrong by itself.

    keys: names in the section, or dotted names from the root; the name of a section stands for all its keys.
    """

    def mark(method: Method) -> Method:
        setattr(method, _CHECKED_KEYS, keys)
        return method

    return mark


def broken_checks(config: Any, at: Place, without: Container[str] = ()) -> Iterator[str]:
    """Yields the violations of all check methods of a config dataclass and of the sections in it.

    without: dotted sections whose own check methods are left out.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}

    def knows(*keys: str) -> bool:
        return at.knows(*(at(key) if key.partition(".")[0] in fields else key for key in keys))

    if at.prefix.rstrip(".") not in without:
        for field in fields.values():
            other = field.metadata.get(_ONLY_WITH)
            if other is not None and knows(field.name, other.partition("=")[0]):
                yield from _effect(config, field, other, at)
        for name in {name: None for cls in reversed(type(config).__mro__) for name in vars(cls)}:
            keys = getattr(getattr(type(config), name), _CHECKED_KEYS, None)
            if keys is not None and knows(*keys):
                yield from getattr(config, name)(at)
    for name in fields:
        if dataclasses.is_dataclass(section := getattr(config, name)):
            yield from broken_checks(section, dataclasses.replace(at, prefix=f"{at(name)}."), without)


def _effect(config: Any, field: dataclasses.Field[Any], only_with: str, at: Place) -> Iterator[str]:
    """Yields the violation of a value that differs from the default and has no effect."""
    value, (other, _, wanted) = getattr(config, field.name), only_with.partition("=")
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    there = show(getattr(config, other))
    if value != default and there not in wanted.split("|"):
        yield (
            f"{at(field.name)} = {show(value)}: has no effect when {at(other)} = {there}; set "
            f"{at(other)}={' or '.join(wanted.split('|'))}, or leave {at(field.name)} out"
        )


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
