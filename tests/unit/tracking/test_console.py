from __future__ import annotations

import io
import re
import threading

import pytest

from scalerl.tracking.console import Progress, duration

STEP = {
    "critic/score/mean": 0.63,
    "response_length/mean": 4.13,
    "perf/throughput": 5321.4,
    "perf/mfu/actor": 0.412,
    "timing_s/gen": 1.2,
    "timing_s/gen/reward": 1.1,
    "timing_s/update_actor": 0.8,
    "timing_s/update_weights": 0.4,
    "timing_s/adv": 0.001,
    "timing_s/step": 3.1,
}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_when_the_stream_is_not_a_terminal():
    stream = io.StringIO()
    progress = Progress(40, stream)
    progress.phase("gen")
    progress.update(12, STEP)
    progress.message("checkpoint saved")
    progress.close()
    assert stream.getvalue() == (
        "step 12/40  reward 0.630  len 4.1  tok/s 5321  mfu 41.2%  gen 1.2s  update 0.8s  sync 0.4s  other 0.7s  "
        "| 3.1s  eta 1m27s\ncheckpoint saved\n"
    )


def test_eta_follows_the_recent_steps():
    progress = Progress(10, io.StringIO())
    progress.update(1, STEP | {"timing_s/step": 30.0})
    progress.update(2, STEP | {"timing_s/step": 10.0})
    assert progress.line(2, STEP).endswith("eta 2m40s")
    for step in range(3, 30):
        progress.update(step, STEP | {"timing_s/step": 10.0})
    assert progress.line(4, STEP).endswith("eta 1m00s")


def test_a_validation_is_a_line_but_not_a_step():
    stream = io.StringIO()
    progress = Progress(40, stream)
    progress.update(0, {"val-core/openai/gsm8k/reward/mean@1": 0.25})
    progress.update(0, {"val-core/a/reward/mean@2": 0.5, "val-core/a/reward/best@2/mean": 0.7})
    progress.update(0, {"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 0.1})
    assert stream.getvalue().splitlines() == [
        "step 0/40  val 0.250",
        "step 0/40  val 0.500",
        "step 0/40  val[a] 0.500  val[b] 0.100",
    ]


def test_the_last_step_and_an_unknown_total_have_no_eta():
    for total in (12, None):
        progress = Progress(total, io.StringIO())
        progress.update(12, STEP)
        assert "eta" not in progress.line(12, STEP)


def test_terminal_shows_a_panel_below_the_lines_and_gives_the_cursor_back(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream, clock = io.StringIO(), Clock()
    progress = Progress(40, stream, terminal=True, clock=clock)
    progress.update(1, STEP | {"critic/score/mean": 0.12})
    progress.update(2, STEP)
    clock.now = 5.0
    progress.phase("update_actor")
    clock.now = 9.0
    progress.phase("update_weights")
    live = stream.getvalue()
    text = ESCAPE.sub("", live)
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    # Each step's line is written once, whatever the panel does after it.
    assert [sum(line.startswith(f"step {step}/40  reward") for line in lines) for step in (1, 2)] == [1, 1]
    assert "╭─ scalerl" in text and "now: update 0s" in text and "now: sync 0s" in text
    assert re.search(r"step 2/40   eta 1m\d\ds", text)
    assert any("tok/s 5321   mfu 41.2%" in line for line in lines)
    assert any("gen 1.2s   update 0.8s   sync 0.4s" in line for line in lines)
    assert "\x1b[?25l" in live and not live.rstrip().endswith("\x1b[?25h")
    progress.close()
    closed = stream.getvalue()
    assert closed.rfind("\x1b[?25h") > closed.rfind("\x1b[?25l")
    progress.message("after")
    progress.close()
    assert stream.getvalue().endswith("after\n")


@pytest.mark.parametrize("call", ["update", "phase", "message"])
def test_the_panel_is_drawn_while_something_is_written(monkeypatch, call):
    """The thread that draws holds the panel's lock, for which a writer waits: it must not wait for the writer."""
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(40, io.StringIO(), terminal=True, clock=Clock())
    drawn = []

    def draw() -> None:
        progress._live.get_renderable()
        drawn.append(call)

    def write(*_: object, **__: object) -> None:
        drawer = threading.Thread(target=draw, daemon=True)
        drawer.start()
        drawer.join(60)

    with progress._lock:
        for place, name in ((progress._live, "refresh"), (progress._console, "print")):
            monkeypatch.setattr(place, name, write)
        {
            "update": lambda: progress.update(1, STEP),
            "phase": lambda: progress.phase("gen"),
            "message": lambda: progress.message("x"),
        }[call]()
    assert drawn and set(drawn) == {call}
    monkeypatch.undo()
    progress.close()


def test_text_of_a_message_is_not_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    progress = Progress(1, stream, terminal=True)
    progress.message("answer [/b] [red]x[/red]")
    progress.close()
    assert "answer [/b] [red]x[/red]" in ESCAPE.sub("", stream.getvalue())


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    dumb, smart = Tty(), Tty()
    Progress(1, dumb).message("x")
    assert dumb.getvalue() == "x\n"
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(1, smart)
    progress.close()
    assert "\x1b[" in smart.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (86, "1m26s"), (7500, "2h05m"), (273600, "3d04h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
