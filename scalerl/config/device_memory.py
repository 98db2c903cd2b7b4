"""How much memory a device has: by its name, or as a number of bytes with a unit."""

from __future__ import annotations

import re

GIB = 1 << 30
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
}
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 1 << 20, "GIB": GIB}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)


def device_memory_bytes(text: str) -> int:
    """Bytes of `80GB` (10^9), `79.1GiB` (2^30) or of a name in DEVICES_GIB.  Raises ValueError for anything else."""
    name = text.strip().lower()
    if name in DEVICES_GIB:
        return int(DEVICES_GIB[name] * GIB)
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ValueError(f"{text!r} is no memory of a device; give {DEVICE_MEMORY_LIMIT}")
    return size


DEVICE_MEMORY_LIMIT = f"a size such as 80GB or 79.1GiB, or one of {', '.join(DEVICES_GIB)}"


def is_device_memory(value: object) -> bool:
    """Whether `device_memory_bytes` takes it."""
    try:
        return isinstance(value, str) and device_memory_bytes(value) > 0
    except ValueError:
        return False
