"""What all processes of a run have recorded for its timeline since the step before."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl.cluster.worker_group import WorkerGroup
from scalerl.tracking import Tracking
from scalerl.tracking.metrics import Timers
from scalerl.tracking.timeline import Span
from scalerl.trainer.ranks.worker import MegatronWorker

# Ranks of a group that are on it: the others do the same at the same time.
MAX_RANKS = 8


def log_timeline(
    tracker: Tracking, timers: Timers, groups: Sequence[WorkerGroup], of_rollout: Sequence[Span], step: int
) -> None:
    """Logs the spans of the driver, of the first ranks of each group, and of the rollout under a step."""
    spans = [*timers.spans.pop(), *of_rollout]
    if tracker.has_timeline:
        for number, group in enumerate(groups):
            for rank in range(min(MAX_RANKS, group.world_size)):
                recorded = group.ask(rank, MegatronWorker.recorded_spans)
                spans += [_of_rank(span, pool="trainer" if number == 0 else None) for span in recorded]
        tracker.log_timeline(spans, step)


def _of_rank(span: Span, pool: str | None) -> Span:
    """The span with the pool of its rank; of a role's own pool, that is the role, which the span's name begins with."""
    return span._replace(who=f"{pool or span.what.partition(' ')[0]} {span.who}")
