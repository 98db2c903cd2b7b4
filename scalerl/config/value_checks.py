"""The values that one key may have: each default in `schema` has a `Domain`. Checks between keys are methods there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scalerl.base.files import GIB


@dataclass(frozen=True)
class Domain:
    """The values that a key may have.

    limit: completes "must be ...".  example: an allowed value, as a user writes it; "": the default of the key.
    is_text: a number or a boolean that a user writes is meant as the text, although the type of the key is Any.
    """

    allows: Callable[[Any], bool]
    limit: str
    example: str = ""
    is_text: bool = False


# Numbers


def at_least(low: float) -> Domain:
    return Domain(lambda v: _is_number(v) and v >= low, f"at least {low:g}", f"{low:g}")


def above(low: float, *, below: float = math.inf, example: float | None = None) -> Domain:
    limit = f"above {low:g}" if below == math.inf else f"above {low:g} and below {below:g}"
    return Domain(lambda v: _is_number(v) and low < v < below, limit, "" if example is None else f"{example:g}")


def all_or_at_least(low: int) -> Domain:
    """A number of at least low, or -1, which switches the limit off."""
    return Domain(lambda v: _is_number(v) and (v == -1 or v >= low), f"-1 (off) or at least {low}", "-1")


FINITE = Domain(lambda v: _is_number(v), "a finite number", "0")
NOT_ZERO = Domain(lambda v: _is_number(v) and v != 0, "a finite number other than 0")
UNIT = Domain(lambda v: _is_number(v) and 0 <= v <= 1, "at least 0 and at most 1", "1")
FRACTION = Domain(lambda v: _is_number(v) and 0 < v <= 1, "above 0 and at most 1", "1")
SAVE_FREQ = Domain(lambda v: _is_number(v) and v >= -1, "-1 (the last step), 0 (none) or at least 1", "-1")
BETAS = Domain(
    lambda v: isinstance(v, list) and len(v) == 2 and all(_is_number(beta) and 0 <= beta < 1 for beta in v),
    "two numbers, each at least 0 and below 1",
    "[0.9,0.999]",
)
TWO_SIZES = Domain(
    lambda v: isinstance(v, list) and len(v) == 2 and all(type(size) is int and size >= 2 for size in v),
    "two whole numbers, each at least 2",
    "[2,2]",
)
STEPS = Domain(lambda v: _are_distinct(v, low=1), "a list of different steps, the first being 1", "[]")
RANKS = Domain(lambda v: _are_distinct(v, low=0) and len(v) > 0, "a list of at least one rank, each once", "[0]")
SEEDS = Domain(lambda v: _are_distinct(v, low=0), "a list of different whole numbers, each at least 0", "[0,1,2]")


def _are_distinct(value: Any, *, low: int) -> bool:
    return (
        isinstance(value, list)
        and all(type(number) is int and number >= low for number in value)
        and len(set(value)) == len(value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Texts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_distinct_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _is_files(value: Any) -> bool:
    paths = value if isinstance(value, list) else [value]
    return len(paths) > 0 and all(map(_is_text, paths))


def _has_one_group(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value).groups == 1
    except re.error:
        return False


TEXT = Domain(_is_text, "a non-empty text", "a name")
TEXTS = Domain(_is_distinct_texts, "a list of different, non-empty texts", "[]")
TARGETS = Domain(
    lambda v: v == "all-linear" or (_is_distinct_texts(v) and len(v) > 0),
    "all-linear, or a list of different names of projections",
)
WEIGHTS = Domain(
    lambda v: isinstance(v, dict) and all(_is_number(weight) for weight in v.values()),
    "finite numbers by name",
    "{correct: 1, format: 0.2}",
)
FILES = Domain(_is_files, "a path or a list of paths", "data.parquet", is_text=True)
PARQUET = Domain(
    lambda v: _is_text(v) and v.endswith(".parquet"), "the path of a file that ends in .parquet", "out.parquet"
)
URL = Domain(
    lambda v: isinstance(v, str) and re.match(r"[a-z][a-z0-9+.-]*://.", v) is not None,
    "a URL, such as s3://bucket/run",
    "s3://bucket/run",
)
SERVER_URL = Domain(
    lambda v: isinstance(v, str) and re.fullmatch(r"https?://[^/\s]+(/\S*)?", v) is not None,
    "the address of a server, such as http://host:30000",
    "http://host:30000",
)
VARIABLE = Domain(
    lambda v: isinstance(v, str) and re.fullmatch(r"[A-Za-z_]\w*", v) is not None,
    "the name of an environment variable",
    "TEACHER_KEY",
)
PATTERN = Domain(_has_one_group, "a regular expression with exactly one group", "'Score: (\\d+)'")


# The memory of a device

# What torch reports as total memory of these devices, GiB.
DEVICES_GIB = {
    "a100": 79.2,
    "a100-40gb": 39.4,
    "a40": 44.4,
    "l40s": 44.4,
    "h100": 79.1,
    "h100-nvl": 93.0,
    "h800": 79.1,
    "h20": 95.0,
    "h200": 139.8,
    "b200": 178.3,
    "gb200": 184.0,
    "mi300x": 191.5,
}
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": GIB}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)


def device_memory_bytes(text: str) -> int:
    """Converts `80GB` (10^9), `79.1GiB` (2^30) or a name in DEVICES_GIB to bytes.  Raises ValueError otherwise."""
    name = text.strip().lower()
    if name in DEVICES_GIB:
        return int(DEVICES_GIB[name] * GIB)
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is no memory of a device; give {DEVICE_MEMORY_LIMIT}")
    return size


DEVICE_MEMORY_LIMIT = f"a size such as 80GB or 79.1GiB, or one of {', '.join(DEVICES_GIB)}"


def is_device_memory(value: object) -> bool:
    """Whether `value` is a text that `device_memory_bytes` can convert."""
    try:
        return isinstance(value, str) and device_memory_bytes(value) > 0
    except ValueError:
        return False


DEVICE_MEMORY = Domain(is_device_memory, DEVICE_MEMORY_LIMIT, "80GB")


# Names


def one_of(*names: str) -> Domain:
    return Domain(lambda v: v in names, f"one of {', '.join(names)}", names[0])


def list_of(*names: str) -> Domain:
    def allows(value: Any) -> bool:
        return isinstance(value, list) and all(name in names for name in value) and len(set(value)) == len(value)

    return Domain(allows, f"a list of {', '.join(names)}, each at most once", f"[{names[0]}]")


def some_of(*names: str, example: str) -> Domain:
    """The domain of one or more of the names, as a list or as one text, separated by commas."""

    def allows(value: Any) -> bool:
        chosen = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        return isinstance(chosen, list) and len(chosen) > 0 and list_of(*names).allows(chosen)

    return Domain(allows, f"some of {', '.join(names)}, each at most once", example)


DTYPE = one_of("bfloat16", "float16", "float32")
_KL_ESTIMATES = ("k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs")
KL_KIND = one_of(*_KL_ESTIMATES, *(f"{name}+" for name in _KL_ESTIMATES))


# Compounds


def or_null(domain: Domain) -> Domain:
    """The values of a domain, and null."""
    return Domain(lambda v: v is None or domain.allows(v), f"null or {domain.limit}", "null", domain.is_text)


def _is_threshold(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(map(_is_threshold, value))
    return _is_number(value) or _is_text(value)


# What the numbers may be depends on what they limit: `config.correction`.
THRESHOLD = Domain(_is_threshold, "a number, a band [lower, upper] or a list of these", "2")


def server_args(engines: tuple[str, ...]) -> Domain:
    """A dict of engine -> arguments of its server's command, api_key excluded."""

    def is_args(value: Any) -> bool:
        return isinstance(value, dict) and not any(
            str(name).replace("-", "_") in ("api_key", "admin_api_key") for name in value
        )

    return Domain(
        lambda v: isinstance(v, dict) and all(engine in engines and is_args(v[engine]) for engine in v),
        f"arguments by engine ({', '.join(engines)}) without api_key, which is a new one in each run",
        "{sglang: {attention_backend: fa3}}",
    )


def show(value: Any) -> str:
    """A value as a user writes it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(inner)}" for key, inner in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) and value.strip() == "" else str(value)
