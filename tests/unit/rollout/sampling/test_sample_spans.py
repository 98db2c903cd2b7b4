"""The timeline of a rollout worker: the samples that ended last, and when its servers had turns to make."""

from __future__ import annotations

from scalerl.rollout.program import Sample
from scalerl.rollout.sampling.groups import SampleGroup
from scalerl.rollout.sampling.sample_spans import MAX_SAMPLES, MAX_SPANS, sample_spans
from scalerl.tracking.timeline import Span, Spans

STEP = 3


def sample(position: int, index: int, *turns: tuple[float, float, int]) -> Sample:
    """turns: begin and end of each, and which of the worker's servers made it."""
    spans = Spans()
    for number, (begin, end, server) in enumerate(turns):
        spans.add("turn", begin, end, turn=number, tokens=10, server=server)
    return Sample(SampleGroup(0, STEP, position).uid, index, [], spans=spans)


def test_servers_are_busy_while_any_sample_has_a_turn_there() -> None:
    """By the number that the server has in the run."""
    samples = [sample(0, 0, (0, 2, 0), (5, 6, 1)), sample(0, 1, (1, 3, 0)), sample(1, 0, (4, 7, 0))]
    spans = sample_spans(samples, servers=[4, 9])
    assert [span for span in spans if span.who.startswith("server")] == [
        Span("server 4", "generate", 0, 3, {"turns": 2, "tokens": 20}),
        Span("server 4", "generate", 4, 7, {"turns": 1, "tokens": 10}),
        Span("server 9", "generate", 5, 6, {"turns": 1, "tokens": 10}),
    ]
    of_first = [span for span in spans if span.who == "sample 0.0"]
    assert sorted(span.about["server"] for span in of_first) == [4, 9]
    assert sample_spans(samples, servers=[4, 9]) == [], "each is sent once"


def test_what_is_sent_is_bounded() -> None:
    """Of many samples those that ended last, of many spans the longest; a turn of no known server counts for none."""
    many = [sample(position, 0, (0, 1 + position, 0)) for position in range(100)]
    long = sample(200, 0, *((at, at + 1 + at / 1000, -1) for at in range(500)))
    spans = sample_spans([*many, long], servers=[0])
    names = {span.who for span in spans if span.who.startswith("sample")}
    assert names == {"sample 200.0", *(f"sample {position}.0" for position in range(101 - MAX_SAMPLES, 100))}
    of_long = [span for span in spans if span.who == "sample 200.0"]
    assert len(of_long) == MAX_SPANS and min(span.begin_s for span in of_long) == 500 - MAX_SPANS
    assert [span.about["turns"] for span in spans if span.who == "server 0"] == [100]
    assert sample_spans([], servers=[0]) == sample_spans([sample(0, 0)], servers=[0]) == []
