"""The part of the run's timeline that a rollout worker has: of some samples all that they did, of servers when they
generated."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalerl.rollout.sampling.groups import SampleGroup
from scalerl.tracking.timeline import Span

if TYPE_CHECKING:
    from scalerl.rollout.program import Sample

# Samples whose spans a worker sends: those that ended last, for which the others have waited. Spans of each, the
# longest ones.
MAX_SAMPLES, MAX_SPANS = 16, 128


def sample_spans(samples: Sequence[Sample], servers: Sequence[int]) -> list[Span]:
    """The spans of the samples that ended last, and of all their servers.

    servers: index of the run's server, for each of the worker's.
    """
    spans_of = {sample_name(sample): sample.spans.pop() for sample in samples}
    ended_s = {name: max(span.end_s for span in spans) for name, spans in spans_of.items() if spans}
    last = heapq.nlargest(MAX_SAMPLES, ended_s, key=lambda name: ended_s[name])
    kept = [
        span._replace(who=name, about=_about(span, servers))
        for name in last
        for span in heapq.nlargest(MAX_SPANS, spans_of[name], key=lambda span: span.seconds)
    ]
    turns = [span for spans in spans_of.values() for span in spans if span.about.get("server", -1) >= 0]
    return [*kept, *_busy(turns, servers)]


def sample_name(sample: Sample) -> str:
    """The name of a sample on the timeline, which has its group's position in the step and its index there."""
    return f"sample {SampleGroup.step_and_position(sample.uid)[1]}.{sample.sample_index}"


def _about(span: Span, servers: Sequence[int]) -> dict[str, int]:
    server = span.about.get("server", -1)
    return span.about | {"server": servers[server]} if server >= 0 else span.about


def _busy(turns: Sequence[Span], servers: Sequence[int]) -> list[Span]:
    """When each server had at least one turn to make, with the number of these and their tokens."""
    busy: dict[int, list[Span]] = {}
    for turn in sorted(turns, key=lambda turn: turn.begin_s):
        of_server = busy.setdefault(servers[turn.about["server"]], [])
        if of_server and turn.begin_s <= of_server[-1].end_s:
            before = of_server.pop()
            about = {"turns": before.about["turns"] + 1, "tokens": before.about["tokens"] + turn.about["tokens"]}
            of_server.append(before._replace(end_s=max(before.end_s, turn.end_s), about=about))
        else:
            about = {"turns": 1, "tokens": turn.about["tokens"]}
            of_server.append(Span("", "generate", turn.begin_s, turn.end_s, about))
    return [span._replace(who=f"server {server}") for server, spans in sorted(busy.items()) for span in spans]
