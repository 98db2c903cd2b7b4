"""What a device computes, reads and sends in a second: data sheets, and the shares of them that runs achieve."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scalerl.errors import UserError
from scalerl.models import ModelShape
from scalerl.models.flops import device_peak_flops


@dataclass(frozen=True)
class Hardware:
    """The rates of one device. Bytes per second are in one direction.

    flops: of dense matrix products in 16 bits, per second.  memory_bandwidth: of its own memory.
    node_size: devices that node_bandwidth connects with each other; further ones are reached by network_bandwidth,
    which each device has for itself.  host_bandwidth: between the device and its host's memory.
    storage_bandwidth: of a node's files.

    The others are no data sheet's. dense_frac, mixture_frac: share of flops that passes of a dense model, and of a
    mixture, achieve.  round_frac, memory_frac: of flops and of memory_bandwidth, a decode round.  network_frac: of
    both bandwidths between devices.  sync_frac, broadcast_frac: of network_bandwidth, a weight sync to servers on the
    trainer's devices, and to others.  sync_s: of a sync in addition.
    round_layer_s: the least seconds of a layer in a decode round.  token_s, request_s: of a server's process for each
    token that it generates, and for each sample.  layer_s, mixture_layer_s: the least seconds of a layer in a forward
    pass.  sequence_s: of attention for each sequence in a layer, where no kernel takes them together.
    message_s, network_message_s: seconds before the first byte of a collective has arrived, inside node_size devices
    and beyond.
    """

    name: str
    flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    node_size: int = 8
    storage_bandwidth: float = 2e9
    # Fitted to a third of the published rows (benchmarks/plan_backtest.py --fit).
    dense_frac: float = 0.529
    mixture_layer_s: float = 5.05e-3
    memory_frac: float = 0.631
    sync_frac: float = 0.331
    round_layer_s: float = 2.26e-4
    token_s: float = 6.87e-5
    network_message_s: float = 9.06e-5
    # Assumed. broadcast_frac: the median of ten published syncs (docs/planning.md).
    network_frac: float = 0.7
    broadcast_frac: float = 0.86
    round_frac: float = 0.529
    layer_s: float = 3e-4
    mixture_frac: float = 0.3
    message_s: float = 1e-5
    request_s: float = 1e-4
    sequence_s: float = 0.0
    sync_s: float = 0.0

    def frac(self, shape: ModelShape) -> float:
        """The share of flops that passes of the model achieve."""
        return self.mixture_frac if shape.num_experts else self.dense_frac

    def link(self, devices: int, together: int = 1) -> tuple[float, float]:
        """How a collective of so many neighbours sends: (seconds before the first byte, bytes of each per second).

        together: those of a node that send the same bytes, and share its connections to other nodes, as rings do.
        """
        if devices <= self.node_size:
            return self.message_s, self.node_bandwidth * self.network_frac
        bandwidth = min(self.node_bandwidth, together * self.network_bandwidth)
        return self.network_message_s, bandwidth * self.network_frac


def _device(name: str, *rates: float, **more: Any) -> Hardware:
    flops = device_peak_flops(name, "bfloat16")
    assert flops is not None
    memory, node, network, host = rates
    return Hardware(name, flops, memory, node, network, host, **more)


# By the names of trainer.device_memory. Bytes per second of memory, of NVLink (Infinity Fabric), network and host link,
# one direction, from the vendors' data sheets: NVIDIA A100 (NVLink 3, 600 GB/s in both directions), H100 and H200
# (NVLink 4, 900 GB/s), H800 (400 GB/s), H20, DGX B200 (NVLink 5, 1.8 TB/s), GB200 NVL72 (72 devices in a domain, NVLink
# C2C to the host), L40S and A40 (PCIe 4), AMD MI300X (7 links of 64 GB/s). Network: a 400 Gb/s adapter for each device
# (DGX H100, B200, GB200: ConnectX-7), A100 200 Gb/s. The flops are models.flops'.
HARDWARE = {
    "a100": _device("A100", 2.039e12, 300e9, 25e9, 25e9),
    "a100-40gb": _device("A100", 1.555e12, 300e9, 25e9, 25e9),
    "a40": _device("A40", 0.696e12, 25e9, 25e9, 25e9),
    "l40s": _device("L40S", 0.864e12, 25e9, 25e9, 25e9),
    "h100": _device("H100", 3.35e12, 450e9, 50e9, 50e9),
    "h100-nvl": _device("H100 NVL", 3.9e12, 300e9, 50e9, 50e9, node_size=2),
    "h800": _device("H800", 3.35e12, 200e9, 50e9, 50e9),
    "h20": _device("H20", 4.0e12, 450e9, 50e9, 50e9),
    "h200": _device("H200", 4.8e12, 450e9, 50e9, 50e9),
    "b200": _device("B200", 8.0e12, 900e9, 50e9, 50e9),
    "gb200": _device("GB200", 8.0e12, 900e9, 50e9, 450e9, node_size=72),
    "mi300x": _device("MI300X", 5.3e12, 448e9, 50e9, 50e9),
}
# The device of a plan whose memory is given as a size.
DEFAULT = "h100"


def hardware_of(device_memory: str | None) -> Hardware:
    """The device that trainer.device_memory names; of a size, or without one, an H100."""
    return HARDWARE.get((device_memory or "").strip().lower(), HARDWARE[DEFAULT])


def read_hardware(path: Path) -> Hardware:
    """Reads a file that `write_hardware` made.  Raises UserError."""
    import yaml

    known = {field.name for field in fields(Hardware)}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--hardware {path}: {error}; make one with scalerl plan --calibrate RUN") from error
    values = values if isinstance(values, dict) else {}
    wrong = sorted(values.keys() - known)
    wrong += [key for key, value in values.items() if key in known - {"name"} and not _is_rate(value)]
    missing = [field for field in ("name", "flops", "memory_bandwidth") if field not in values]
    if wrong or missing:
        said = [f"{key} = {values[key]!r} is no rate" if key in known else f"{key} is unknown" for key in wrong]
        said += [f"{key} is missing" for key in missing]
        raise UserError(f"--hardware {path}: {'; '.join(said)}; its keys are {', '.join(sorted(known))}, above 0")
    between = {key: values.pop(key, values["memory_bandwidth"]) for key in _BETWEEN}
    return Hardware(**between, **values)


_BETWEEN = ("node_bandwidth", "network_bandwidth", "host_bandwidth")


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Writes a YAML file for `read_hardware`."""
    values = {key: f"{value:.6e}" if isinstance(value, float) else value for key, value in asdict(hardware).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()), encoding="utf-8")
