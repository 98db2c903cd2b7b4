"""A plan as text: the summary that a run prints at its start, and the tables of `scalerl plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scalerl.base.files import GIB
from scalerl.extras.plan.plan import CHECKPOINT_PIECE_BYTES, SOURCES, DevicePlan, MemoryPlan

if TYPE_CHECKING:
    from scalerl.extras.plan.hardware import Hardware
    from scalerl.extras.plan.seconds import StepSeconds


def summary(plan: MemoryPlan) -> str:
    """A line for each kind of device with its peak, one for the servers, one for what is sent and saved."""
    return "\n".join([*(_peak_line(device, _of(plan)) for device in _ends(plan.devices)), *_totals(plan)])


def plan_table(plan: MemoryPlan) -> str:
    """Every phase of every kind of device, part by part, in GiB; then where the numbers come from."""
    lines: list[str] = []
    for device in _ends(plan.devices):
        layers = f" ({len(device.layers)} layers)" if device.layers else ""
        peak = f"at most {device.peak.num_bytes / GIB:.1f}{_of(plan)} GiB, in {device.peak.name}"
        lines.append(f"{device.name}{layers}: {peak}")
        for phase in device.phases:
            mark = " <- peak" if phase is device.peak else ""
            lines.append(f"  {phase.name:<28}{phase.num_bytes / GIB:>8.1f} GiB{mark}")
            lines += [f"    {name:<26}{size / GIB:>8.2f}" for name, size in phase.parts.items() if size]
    names = {name for device in plan.devices for phase in device.phases for name in phase.parts}
    lines += ["", "where the numbers come from"]
    lines += [f"  {part:<16}{source}" for part, source in SOURCES.items() if any(n.endswith(part) for n in names)]
    rank, node = CHECKPOINT_PIECE_BYTES / GIB, plan.devices_per_node * CHECKPOINT_PIECE_BYTES / GIB
    checkpoint = (
        f"host memory of a save that is waited for, and of a load: at most {rank:.2f} GiB for a rank, {node:.2f} GiB "
        "on its node, in addition to its other memory"
    )
    return "\n".join([*lines, "", *_totals(plan), checkpoint])


def fit_line(plan: MemoryPlan) -> str:
    """Whether the run fits its devices, as text."""
    if plan.memory_bytes is None:
        return "whether it fits is not said, because the device's memory is not known: give --device-memory"
    return f"the run {'does not fit' if plan.problems() else 'fits'} devices of {plan.memory_bytes / GIB:.1f} GiB"


def seconds_table(step: StepSeconds, hardware: Hardware, *, only_total: bool = False) -> str:
    """A predicted step, phase by phase, each by what it waits for."""
    rate = f"{_short(step.tokens_per_s)} tokens/s a device"
    total = f"a step on {hardware.name} devices: {_short(step.total)} s predicted, {rate}"
    if only_total:
        return total
    lines = [total + (", generation beside the rest" if step.is_beside else "")]
    for phase, parts in step.phases.items():
        lines.append(f"  {phase:<28}{step.seconds(phase):>8.2f} s")
        lines += [f"    {name:<26}{seconds:>8.2f}" for name, seconds in parts.items() if seconds >= 0.005]
    return "\n".join(
        [*lines, "not counted: rewards, tools, validations, a vision tower, ranks that wait for each other", ""]
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _of(plan: MemoryPlan) -> str:
    return "" if plan.memory_bytes is None else f" of {plan.memory_bytes / GIB:.1f}"


def _ends(devices: Sequence[DevicePlan]) -> list[DevicePlan]:
    """The devices to show: of a pipeline the first, the fullest of those between, and the last stage; all others."""
    stages = [device for device in devices if device.name.startswith("trainer")]
    others = [device for device in devices if device not in stages]
    if len(stages) > 3:
        stages = [stages[0], max(stages[1:-1], key=lambda device: device.peak.num_bytes), stages[-1]]
    return [*stages, *others]


def _peak_line(device: DevicePlan, of: str) -> str:
    peak = device.peak
    parts = sorted((part for part in peak.parts.items() if part[1]), key=lambda part: -part[1])
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:4])
    return f"memory of {device.name}: at most {peak.num_bytes / GIB:.1f}{of} GiB, in {peak.name} ({shown})"


def _totals(plan: MemoryPlan) -> Iterator[str]:
    trained = "" if plan.num_trained is None else f", of adapters {plan.num_trained / 1e9:.3f} billion"
    sync = f"; a weight sync sends {plan.sync_bytes / GIB:.1f} GiB to each replica" if plan.server else ""
    saved = f"checkpoint {plan.checkpoint_bytes / GIB:.1f} GiB"
    yield f"parameters: {plan.num_parameters / 1e9:.2f} billion{trained}; {saved}{sync}"
    if copies := {device.name: device.save_copy_bytes for device in plan.devices if device.save_copy_bytes}:
        name = max(copies, key=lambda name: copies[name])
        yield (
            f"host memory of saves (trainer.async_save): {copies[name] / GIB:.1f} GiB for a rank of {name}, "
            f"{plan.devices_per_node * copies[name] / GIB:.1f} GiB on its node"
        )
    if plan.backup_bytes:
        yield (
            f"host memory of servers, for weights that leave the devices: {plan.backup_bytes / GIB:.1f} GiB for a rank "
            f"of a server, {plan.devices_per_node * plan.backup_bytes / GIB:.1f} GiB on its node"
        )
    if plan.routed is not None:
        server = "" if plan.routed.server is None else f"; {plan.routed.server / GIB:.1f} GiB for a rank of a server"
        yield (
            f"host memory of routed experts (algorithm.routing_replay): {plan.routed.token} bytes per token; for a "
            f"step's samples at most {plan.routed.step / GIB:.1f} GiB in the rollout workers, and as much in Ray's "
            f"object store{server}"
        )
    if plan.server is None:
        return
    per_token = f"{plan.server.kv_token_bytes / 1024:.1f} KiB per token"
    if plan.server.kv_tokens is None:
        yield f"KV cache: {per_token} and device; its size needs the device's memory (trainer.device_memory)"
    else:
        yield (
            f"KV cache: {max(0, plan.server.kv_tokens)} tokens in each replica, {per_token} and device: "
            f"{plan.concurrency} samples of {plan.longest_sample} tokens at a time"
        )
