"""The doors from the core to `scalerl.extras`: the core opens a door by its name and imports no extra itself.

The core works without the folder `scalerl/extras`; a door is then closed, and what stands behind it is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

# Door -> module:name of what stands behind it.
DOORS = {
    # The translator of keys that are another system's (`config.foreign_keys.Translator`).
    "foreign_keys": "scalerl.extras.verl.keys:Translator",
    # The check whether a run fits its devices (`trainer.checks.machine.PlanMemory`).
    "plan_memory": "scalerl.extras.plan.check:plan_memory",
    # The report of a run that ends (`trainer.own_report`).
    "report": "scalerl.extras.report.command:at_the_end",
    # What an SGLang server needs to start without a GPU (`rollout.servers.engines.sglang`).
    "sglang_on_cpu": "scalerl.extras.sglang_cpu.server:on_cpu",
    # The environment in which sglang is imported without a GPU.
    "sglang_cpu_imports": "scalerl.extras.sglang_cpu.server:import_environment",
}


def extra(door: str) -> Any:
    """What stands behind a door; None where `scalerl.extras` is not installed."""
    if importlib.util.find_spec("scalerl.extras") is None:
        return None
    module, _, name = DOORS[door].partition(":")
    return getattr(importlib.import_module(module), name)
