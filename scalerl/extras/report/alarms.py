"""The alarms of a run, found in its metrics by the limits of its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from scalerl.config.schema import AlarmsConfig
from scalerl.extras.report.run_files import RunFiles
from scalerl.trainer.alarms import KINDS, Kind, raised


@dataclass(frozen=True)
class RaisedAlarm:
    """An alarm of a run.  steps: those that raised it.  worst: the value that is farthest beyond the limit."""

    name: str
    kind: Kind
    metric: str
    limit: float
    worst: float
    steps: list[int] = field(default_factory=list)


def alarms(run: RunFiles) -> list[RaisedAlarm]:
    """The alarms of a run, by the limits of its configuration, in the order of the steps that raised them first."""
    if "actor_rollout_ref" not in run.config:
        return []
    limits = vars(AlarmsConfig()) | dict(run.value("trainer.alarms", {}))
    num_samples = run.value("data.train_batch_size", 1) * run.value("actor_rollout_ref.rollout.n", 1)
    found: dict[str, RaisedAlarm] = {}
    for step in run.trained:
        for alarm in raised(run.steps[step], limits, num_samples):
            before = found.get(alarm.name)
            is_worse = before is None or KINDS[alarm.name].is_beyond(alarm.value, before.worst)
            worst = alarm.value if before is None or is_worse else before.worst
            steps = [*(before.steps if before else ()), step]
            found[alarm.name] = RaisedAlarm(alarm.name, alarm.kind, alarm.metric, alarm.limit, worst, steps)
    return list(found.values())
