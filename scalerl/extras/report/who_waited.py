"""The timeline of a step: who worked and who waited, as a figure and in sentences; of all steps as a Perfetto trace."""

from __future__ import annotations

import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from scalerl.base.files import whole_file
from scalerl.extras.report.charts import COLOUR_OF, Figure, layout
from scalerl.extras.report.run_files import RunFiles
from scalerl.tracking.timeline import Span

# The whole of a sample, in which the other spans are.
PROGRAM, QUEUED, TURN, REWARD = "program", "queued", "turn", "reward"
# The two parts of a turn on its server: until its first token, and the rest.
PREFILL, DECODE = "prefill", "decode"
_COLOURS = COLOUR_OF | {
    PROGRAM: "#e8e8e8",
    QUEUED: "#f2c0b8",
    TURN: "#4269d0",
    PREFILL: "#1b2f66",
    DECODE: "#6f8fe0",
    REWARD: "#17becf",
    "generate": "#97bbf5",
    "user": "#efb118",
}
# Of tools, of which there may be any number.
_TOOLS = ("#7f3c8d", "#9c6b4e", "#d62728", "#bcbd22", "#e377c2")
_ROW_PX, _AROUND_PX = 20, 150


def chosen_steps(run: RunFiles) -> dict[str, int]:
    """The steps that a report shows, by what is said of them: a usual one and the longest one."""
    seconds = {step: run.steps[step]["timing_s/step"] for step in run.trained if step in run.timeline}
    if not seconds:
        return {}
    # The first step has what nothing has warmed up.
    later = {step: took for step, took in seconds.items() if step != min(seconds)} or seconds
    usual = next(step for step, took in later.items() if took == median_low(later.values()))
    longest = max(seconds, key=lambda step: seconds[step])
    return {"a usual step": usual} | ({"the longest step": longest} if longest != usual else {})


def timeline_figure(spans: Sequence[Span], title: str) -> Figure:
    """A row for each process and sample, a bar for each span; seconds since the first of the driver's."""
    origin = min((span.begin_s for span in spans if span.who == "driver"), default=min(span.begin_s for span in spans))
    rows = sorted({span.who for span in spans}, key=_place_of)
    by_name: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.what != PROGRAM, span.begin_s, -span.end_s)):
        by_name.setdefault(_name_of(span), []).append(span)
    tools = [name for name in by_name if name not in _COLOURS]
    colours = _COLOURS | {name: _TOOLS[place % len(_TOOLS)] for place, name in enumerate(tools)}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": html.escape(name),
            "y": [html.escape(span.who) for span in named],
            "base": [round(span.begin_s - origin, 4) for span in named],
            "x": [round(span.seconds, 4) for span in named],
            "width": 0.9 if name == PROGRAM else 0.6,
            "marker": {"color": colours[name]},
            "text": [_about(span) for span in named],
            "textposition": "none",
            "hovertemplate": "%{y}: %{fullData.name}, %{x:.3f} s from %{base:.3f} s%{text}<extra></extra>",
        }
        for name, named in by_name.items()
    ]
    order = {"categoryorder": "array", "categoryarray": [html.escape(who) for who in rows], "autorange": "reversed"}
    # Each row has its name.
    order |= {"tickmode": "linear", "dtick": 1}
    made = layout(title, "seconds", "")
    made |= {"barmode": "overlay", "height": _AROUND_PX + _ROW_PX * len(rows)}
    made["yaxis"] |= order
    return {"data": traces, "layout": made}


def _name_of(span: Span) -> str:
    """The name of a span: on a rank without the role, so that it is that of the driver's part."""
    return span.what.partition(" ")[2] or span.what if " rank " in span.who else span.what


def _about(span: Span) -> str:
    return "".join(f", {html.escape(str(name))} {number}" for name, number in span.about.items())


def _place_of(who: str) -> tuple[int, str, float]:
    """Where a row is: the driver, ranks, servers, samples, each by its number."""
    name, _, number = who.rpartition(" ")
    group = 0 if who == "driver" else 1 if "rank" in name else 2 if name == "server" else 3
    try:
        return group, name, float(number)
    except ValueError:
        return group, name, 0.0


def said(spans: Sequence[Span]) -> list[str]:
    """Who worked and who waited in a step, in sentences."""
    driver = [span for span in spans if span.who == "driver"]
    if not driver:
        return []
    begin_s, end_s = min(span.begin_s for span in driver), max(span.end_s for span in driver)
    step_s = max(end_s - begin_s, 1e-9)
    sentences = []
    for name, of in (("The trainer's ranks computed", " rank "), ("The servers generated", "server ")):
        shares = [_covered(mine, begin_s, end_s) / step_s for who, mine in _by_who(spans).items() if of in who]
        if shares:
            least, most = min(shares), max(shares)
            some = "" if most - least < 0.05 else f" ({least:.0%} to {most:.0%})"
            sentences.append(f"{name} in {sum(shares) / len(shares):.0%} of the step{some}.")
    samples = {who: mine for who, mine in _by_who(spans).items() if who.startswith("sample ")}
    if samples:
        last = max(samples, key=lambda who: max(span.end_s for span in samples[who]))
        sentences.append(_of_sample(last, samples[last]))
    return sentences


def _of_sample(who: str, spans: Sequence[Span]) -> str:
    turns = [span for span in spans if span.what == TURN]
    tools = [span for span in spans if span.what not in (PROGRAM, QUEUED, TURN, PREFILL, DECODE, REWARD)]
    parts = {
        f"in {len(turns)} turn{'s' * (len(turns) != 1)} of the policy": turns,
        "of them before a first token": [span for span in spans if span.what == PREFILL],
        "in line for a server": [span for span in spans if span.what == QUEUED],
        "in tools": tools,
        "in its reward": [span for span in spans if span.what == REWARD],
    }
    took_s = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    shown = [f"{sum(span.seconds for span in mine):.2f} s {name}" for name, mine in parts.items() if mine]
    inside = [span for span in spans if span.what != PROGRAM]
    own_s = sum(span.seconds - _covered(inside, span.begin_s, span.end_s) for span in spans if span.what == PROGRAM)
    # Of an agent all that it does between its requests.
    shown += [f"{own_s:.2f} s in its program alone"] if own_s >= 0.005 else []
    return f"All waited for {who} at the end: it took {took_s:.2f} s, {', '.join(shown)}."


def _by_who(spans: Iterable[Span]) -> dict[str, list[Span]]:
    by_who: dict[str, list[Span]] = {}
    for span in spans:
        by_who.setdefault(span.who, []).append(span)
    return by_who


def _covered(spans: Sequence[Span], begin_s: float, end_s: float) -> float:
    """Seconds of a window in which there was at least one of the spans."""
    covered, until = 0.0, begin_s
    for span in sorted(spans, key=lambda span: span.begin_s):
        start, end = max(span.begin_s, until), min(span.end_s, end_s)
        covered += max(0.0, end - start)
        until = max(until, end)
    return covered


# --- Perfetto ---


def write_trace(run: RunFiles, path: Path) -> None:
    """Writes the spans of all steps in Chrome's trace format, gzipped, which https://ui.perfetto.dev opens."""
    events = list(trace_events(run.timeline))
    with whole_file(path) as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        packed.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def trace_events(timeline: Mapping[int, Sequence[Span]]) -> Iterable[dict[str, Any]]:
    """The events of a trace. A track has spans that lie in each other or follow each other; others get one more."""
    by_who = _by_who(span._replace(about=span.about | {"step": step}) for step in timeline for span in timeline[step])
    for row, who in enumerate(sorted(by_who, key=_place_of)):
        kind = _place_of(who)[0]
        for lane, spans in enumerate(lanes(by_who[who])):
            track = {"pid": kind, "tid": 1000 * row + lane}
            name = {"name": who if lane == 0 else f"{who} ({lane + 1})"}
            yield {"ph": "M", "name": "thread_name", "args": name, **track}
            yield {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": track["tid"]}, **track}
            for span in spans:
                times = {"ts": round(span.begin_s * 1e6), "dur": round(span.seconds * 1e6)}
                yield {"ph": "X", "name": span.what, "cat": who, "args": span.about, **times, **track}
    for kind, name in enumerate(("driver", "trainer ranks", "servers", "samples")):
        yield {"ph": "M", "name": "process_name", "pid": kind, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": kind, "args": {"sort_index": kind}}


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans in lanes, in each of which any two are apart or one is in the other."""
    made: list[list[Span]] = []
    # Of each lane: the ends of the spans that are not over.
    open_ends: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):
        for lane, ends in zip(made, open_ends, strict=True):
            while ends and ends[-1] <= span.begin_s:
                ends.pop()
            if not ends or span.end_s <= ends[-1]:
                lane.append(span)
                ends.append(span.end_s)
                break
        else:
            made.append([span])
            open_ends.append([span.end_s])
    return made
