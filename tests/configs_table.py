"""The table of docs/models.md: devices, bytes and predicted seconds of the runs in configs/."""

from __future__ import annotations

from scalerl.base.files import GIB
from scalerl.config import world_size
from scalerl.config.value_checks import device_memory_bytes
from scalerl.extras.plan.hardware import HARDWARE
from scalerl.extras.plan.plan import ADAPTERS, STATES, MemoryPlan, memory_plan
from scalerl.extras.plan.seconds import lengths_of, step_seconds
from tests.model_configs import FILES, run_config, run_shapes

_COLUMNS = (
    "file",
    "devices",
    "parameters, 10^9",
    "trainer's peak, GiB",
    "server, GiB",
    "KV tokens of a replica",
    "checkpoint, GiB",
    "step, s",
)


def docs_table(memory_bytes: int) -> str:
    """A row for each file. memory_bytes: of a device."""
    return "\n".join(
        [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *(_row(name, memory_bytes) for name in FILES)]
    )


def _row(name: str, memory_bytes: int) -> str:
    cfg, shapes = run_config(name), run_shapes(name)
    plan = memory_plan(cfg, shapes, memory_bytes=memory_bytes)
    server = plan.server
    assert server is not None and server.kv_tokens is not None
    seconds = step_seconds(cfg, shapes, server, HARDWARE["h100"], lengths_of(cfg)).total
    fits = " (refused)" if plan.problems() else ""
    cells = [
        f"`{name}`",
        str(world_size(cfg)),
        f"{plan.num_parameters / 1e9:.1f}",
        f"{_trainers_peak(plan) / GIB:.1f}",
        f"{(server.weights + server.kv_bytes + server.states + server.adapters) / GIB:.1f}{fits}",
        f"{max(0, server.kv_tokens):,}",
        f"{plan.checkpoint_bytes / GIB:.0f}",
        f"{seconds:.0f}" if plan.concurrency else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _trainers_peak(plan: MemoryPlan) -> int:
    """Of all phases, without the weights and the KV cache of servers."""
    of_servers = ("server weights", "KV cache", STATES, ADAPTERS)
    phases = [phase for device in plan.devices for phase in device.phases]
    return max(sum(size for part, size in phase.parts.items() if part not in of_servers) for phase in phases)


if __name__ == "__main__":
    print(docs_table(device_memory_bytes("80GB")))
