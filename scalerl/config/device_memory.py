"""The memory of a device, parsed from its name or from a size with a unit."""

from __future__ import annotations

import re

from scalerl.base.files import GIB

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
