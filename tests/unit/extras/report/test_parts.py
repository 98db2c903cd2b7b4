"""The parts of a report, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl.errors import UserError
from scalerl.extras.report import charts, who_waited
from scalerl.extras.report.conversations import Message, compared, messages_of
from scalerl.extras.report.faults import CONTINUED, fault_figure, faults
from scalerl.extras.report.run_files import Answer, RunFiles, read_run
from scalerl.tracking.timeline import Span

SECONDS = st.integers(0, 30)
SPANS = st.lists(st.tuples(SECONDS, SECONDS).map(lambda ends: Span("a", "x", min(ends), max(ends))), max_size=20)


def run_of(steps: dict[int, dict[str, float]], **more: object) -> RunFiles:
    return RunFiles(Path("run"), {}, steps, **more)  # pyright: ignore[reportArgumentType]


def write(directory: Path, file: str, *lines: dict) -> None:
    (directory / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_run_is_read_as_it_went_on(tmp_path: Path) -> None:
    """What a resume replaced is gone; when it went on is known; the last line may be half written."""
    steps = [{"step": step, "data": {"x": step, "y": "nan"}} for step in (1, 2, 3)]
    write(tmp_path, "metrics.jsonl", *steps, {"resumed_from": 1}, {"step": 2, "data": {"x": 20}})
    spans = [{"step": step, "spans": [["driver", "gen", step, step + 1, {"tokens": 3}]]} for step in (1, 2, 3)]
    write(
        tmp_path, "timeline.jsonl", *spans, {"resumed_from": 1}, {"step": 2, "spans": [["driver", "gen", 90, 95, {}]]}
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "da')
    run = read_run(tmp_path)
    assert run.series("x") == ([1, 2], [1.0, 20.0])
    assert math.isnan(run.steps[1]["y"])
    assert run.timeline == {1: [Span("driver", "gen", 1, 2, {"tokens": 3})], 2: [Span("driver", "gen", 90, 95, {})]}
    assert run.resumes == [(1, 90)]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "trainer.logger"), ('{"step": 1, "data": {}}\nx\n', "line 2"), ('{"stop": 1}\n', "step")],
)
def test_what_is_no_run_is_an_error_of_the_user(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"{tmp_path}.*{says}"):
        read_run(tmp_path)


def test_a_curve_of_many_steps_keeps_its_extremes() -> None:
    steps = list(range(5000))
    values = [1.0] * 5000
    values[1234], values[4000] = 50.0, math.nan
    kept_steps, kept = charts.thinned(steps, values)
    assert len(kept_steps) == charts.MAX_POINTS and kept_steps == sorted(set(kept_steps))
    assert (1234, 50.0) in list(zip(kept_steps, kept, strict=True))
    assert charts.thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])
    assert charts.thinned([], []) == ([], [])


def test_parts_of_a_step_are_stacked_whatever_their_names() -> None:
    run = run_of({1: {"timing_s/step": 3.0, "timing_s/gen": 1.0, "timing_s/gen/tools/max": 0.5, "timing_s/mine": 2.0}})
    figure = charts.phases(run)
    assert figure is not None
    assert {trace["name"]: trace["y"] for trace in figure["data"]} == {"gen": [1.0], "mine": [2.0]}


def test_one_of_two_equal_curves_is_drawn_and_names_are_text() -> None:
    run = run_of({1: {"critic/score/mean": 1.0, "critic/rewards/mean": 1.0, "val-core/<b>/reward/mean@1": 0.5}})
    figures = [charts.curves(chart, [run]) for chart in charts.LEARNING]
    named = [[trace["name"] for trace in figure["data"]] for figure in figures if figure]
    assert named == [["score"], ["&lt;b&gt;/reward/mean@1"]]


@given(SPANS)
def test_in_a_lane_spans_are_apart_or_in_each_other(spans: list[Span]) -> None:
    lanes = who_waited.lanes(spans)
    assert sorted(span for lane in lanes for span in lane) == sorted(spans)
    for lane in lanes:
        for one in lane:
            for two in lane:
                is_apart = one.end_s <= two.begin_s or two.end_s <= one.begin_s
                is_inside = one.begin_s >= two.begin_s and one.end_s <= two.end_s
                assert is_apart or is_inside or (two.begin_s >= one.begin_s and two.end_s <= one.end_s)


@given(SPANS, SECONDS, SECONDS)
def test_covered_seconds_are_those_of_a_count_by_hand(spans: list[Span], one: int, two: int) -> None:
    begin, end = min(one, two), max(one, two)
    by_hand = sum(any(span.begin_s <= at < span.end_s for span in spans) for at in range(begin, end))
    assert who_waited._covered(spans, begin, end) == by_hand


def test_who_waited_is_said_in_words() -> None:
    spans = [
        Span("driver", "gen", 100, 106),
        Span("driver", "update_actor", 106, 110),
        Span("trainer rank 0", "actor update_actor", 106, 110),
        Span("trainer rank 1", "actor update_actor", 107, 110),
        Span("server 0", "generate", 100, 105),
        Span("sample 0.0", "turn", 100, 101, {"turn": 0, "server": 0}),
        Span("sample 3.1", "program", 100, 105.5),
        Span("sample 3.1", "queued", 100, 101),
        Span("sample 3.1", "turn", 101, 103, {"turn": 0, "server": 0}),
        Span("sample 3.1", "prefill", 101, 101.5, {"turn": 0}),
        Span("sample 3.1", "decode", 101.5, 103, {"turn": 0}),
        Span("sample 3.1", "tool python", 103, 104),
        Span("sample 3.1", "turn", 104, 105, {"turn": 1, "server": 0}),
        Span("sample 3.1", "reward", 105.5, 106),
    ]
    assert who_waited.said(spans) == [
        "The trainer's ranks computed in 35% of the step (30% to 40%).",
        "The servers generated in 50% of the step.",
        "All waited for sample 3.1 at the end: it took 6.00 s, 3.00 s in 2 turns of the policy, 0.50 s of "
        "them before a first token, 1.00 s in line for a server, 1.00 s in tools, 0.50 s in its reward, 0.50 s "
        "in its program alone.",
    ]
    figure = who_waited.timeline_figure(spans, "t")
    rows = figure["layout"]["yaxis"]["categoryarray"]
    assert rows == ["driver", "trainer rank 0", "trainer rank 1", "server 0", "sample 0.0", "sample 3.1"]
    # A rank's pass has the colour of the driver's part.
    assert {"gen", "update_actor", "tool python"} <= {trace["name"] for trace in figure["data"]}


def test_a_usual_step_is_not_the_first() -> None:
    seconds = {1: 9.0, 2: 2.0, 3: 1.0, 4: 3.0}
    spans = {step: [Span("driver", "gen", 0, 1)] for step in seconds}
    run = run_of({step: {"timing_s/step": took} for step, took in seconds.items()}, timeline=spans)
    assert who_waited.chosen_steps(run) == {"a usual step": 2, "the longest step": 1}
    assert who_waited.chosen_steps(run_of(dict(run.steps))) == {}


def test_faults_are_on_the_time_axis() -> None:
    steps = {1: {"rollout/num_restarts": 0.0}, 2: {"rollout/num_restarts": 2.0, "reward/num_failed": 1.0}}
    spans = {step: [Span("driver", "gen", 60.0 * step, 60.0 * step + 30)] for step in steps}
    run = run_of(steps, timeline=spans, resumes=[(1, 119.0)])
    found = faults(run)
    assert [(fault.what, fault.number, fault.step, fault.at_s) for fault in found] == [
        (CONTINUED, 1, 1, 119.0),
        ("rewards failed", 1, 2, 150.0),
        ("server restarted", 2, 2, 150.0),
    ]
    figure = fault_figure(run, found)
    assert figure is not None and figure["data"][2]["x"] == ["1970-01-01T00:02:30.000"]
    without_times = run_of(steps)
    figure = fault_figure(without_times, faults(without_times))
    assert figure is not None and [trace["x"] for trace in figure["data"]] == [[2], [2]]
    assert fault_figure(run, []) is None


def test_a_response_of_several_turns_is_a_conversation() -> None:
    text = "[assistant]\nI look it up.\n[tool, masked]\n[1, 2]\n4\n[assistant]\n4"
    assert messages_of(text) == [
        Message("assistant", "I look it up."),
        Message("tool", "[1, 2]\n4", True),
        Message("assistant", "4"),
    ]
    assert messages_of("just\ntext") == [Message("assistant", "just\ntext")]
    assert messages_of("") == [Message("assistant", "")]
    assert messages_of("x" * 5000)[0].text.endswith("… (1000 more characters)")


def test_samples_are_compared_by_prompt_those_that_changed_most_first() -> None:
    before = [Answer("a", "1", 0.0), Answer("b", "1", 0.5), Answer("c", "1", 1.0)]
    after = [Answer("b", "2", 0.25), Answer("c", "2", 1.0), Answer("a", "2", 1.0, "2")]
    shown = compared(run_of({}, answers={0: before, 8: after}))
    assert [sample.prompt for sample in shown] == ["a", "b", "c"]
    assert shown[0].ground_truth == "2"
    assert shown[0].answers == {0: ([Message("assistant", "1")], 0.0), 8: ([Message("assistant", "2")], 1.0)}
    # Dumps of two steps need not have a prompt in common.
    apart = compared(run_of({}, answers={1: before[:1], 2: after[:1]}))
    assert [(sample.prompt, list(sample.answers)) for sample in apart] == [("a", [1]), ("b", [2])]
    assert compared(run_of({})) == []
