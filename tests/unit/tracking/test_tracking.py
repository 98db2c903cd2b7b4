from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from scalerl.tracking import Tracking, backend_names
from scalerl.tracking.metrics import Metric
from scalerl.tracking.timeline import Span
from tests.filesystems import mounted


def jsonl(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_unknown_backend_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"unknown backend 'clearml'; use any of console, file, mlflow"):
        Tracking("p", "e", ["console", "clearml"], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        Tracking("p", "e", "file", run_dir=tmp_path)


def test_console_is_the_default_and_counts_steps(tmp_path, capsys):
    with Tracking("p", "e", run_dir=tmp_path, total_steps=3) as tracking:
        assert list(tracking.logger) == ["console"]
        assert tracking.run_id is None and tracking.tracking_uri is None
        tracking.log({"critic/score/mean": Metric(0.5, "mean"), "timing_s/step": 2.0}, step=1)
        tracking.message("saved")
    assert capsys.readouterr().out == "step 1/3  reward 0.500  other 2.0s  | 2.0s  eta 4s\nsaved\n"


def test_file_keeps_one_line_per_log_and_plain_json(tmp_path):
    tracking = Tracking("p", "e", "file", run_dir=tmp_path)
    tracking.log({"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": Metric(3, "sum")}, step=1)
    tracking.log({"e": float("nan"), "f": float("-inf")}, step=2)
    tracking.finish()
    assert jsonl(tmp_path) == [
        {"step": 1, "data": {"a": 1.0, "b": 0.5, "c": 2.0, "d": 3.0}},
        {"step": 2, "data": {"e": "nan", "f": "-inf"}},
    ]


def test_a_resumed_run_appends_and_says_from_where(tmp_path):
    for resumed_from, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with Tracking("p", "e", "file", run_dir=tmp_path, resumed_from=resumed_from) as tracking:
            for step in steps:
                tracking.log({"x": step}, step)
    lines = jsonl(tmp_path)
    assert [line.get("step", line) for line in lines] == [1, 2, 3, {"resumed_from": 2}, 3, 4]


def test_the_torn_line_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {}}\n{"step": 2, "da')
    with Tracking("p", "e", "file", run_dir=tmp_path, resumed_from=1) as tracking:
        tracking.log({}, 2)
    assert jsonl(tmp_path) == [{"step": 1, "data": {}}, {"resumed_from": 1}, {"step": 2, "data": {}}]


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path, caplog):
    """Also the one of which a part had room; a line in the middle of the file is whole."""
    with mounted(tmp_path / "run", "size=64k") as run_dir:
        with Tracking("p", "e", "file", run_dir=run_dir) as tracking:
            tracking.log({"x": 1.0}, 1)
            tracking.flush()
            ballast = run_dir / "ballast"
            ballast.write_bytes(bytes(48 << 10))
            for step in (2, 3):
                tracking.log({f"metric_{number}": float(number) for number in range(1000)}, step)
            tracking.flush()
            assert '{"step": 2' in (run_dir / "metrics.jsonl").read_text(), "a part of it"
            assert "No space left on device" in caplog.text
            ballast.unlink()
            tracking.log({"x": 4.0}, 4)
        lines = jsonl(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [len(line["data"]) for line in lines] == [1, 1000, 1000, 1]


def test_the_timeline_of_a_run_is_in_its_files_alone(tmp_path, capsys):
    """In the order of the spans; a resumed run says from where, as in metrics.jsonl."""
    spans = [Span("driver", "adv", 2.0, 3.00004), Span("sample 0.0", "turn", 1.0, 2.0, {"tokens": 3})]
    for resumed_from in (0, 1):
        with Tracking("p", "e", ["console", "file"], run_dir=tmp_path, resumed_from=resumed_from) as tracking:
            assert tracking.has_timeline
            tracking.log_timeline(spans, resumed_from + 1)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line.get("step", line) for line in lines] == [1, {"resumed_from": 1}, 2]
    assert lines[0]["spans"] == [["sample 0.0", "turn", 1.0, 2.0, {"tokens": 3}], ["driver", "adv", 2.0, 3.0, {}]]
    assert Span(*lines[0]["spans"][0]) == spans[1]
    with Tracking("p", "e", "console", run_dir=tmp_path / "other") as tracking:
        tracking.log_timeline(spans, 1)
        tracking.tag("alarm.kl", "1")
        assert not tracking.has_timeline
    assert list((tmp_path / "other").iterdir()) == [] and capsys.readouterr().out == ""


def test_log_reaches_the_named_backends_only(tmp_path, capsys):
    with Tracking("p", "e", ["console", "file"], run_dir=tmp_path) as tracking:
        tracking.log({"train/loss": 1.0}, 1, backend="file")
        tracking.log({"train/loss": 2.0}, 2, backend=["console"])
    assert [line["step"] for line in jsonl(tmp_path)] == [1]
    assert capsys.readouterr().out == "step 2  loss 2.0000\n"


def test_a_value_that_is_not_a_number_is_left_out_with_one_warning(tmp_path, caplog):
    with Tracking("p", "e", "file", run_dir=tmp_path) as tracking:
        for step in (1, 2):
            tracking.log({"ok": 1.0, "text": "abc", "vector": np.ones(2)}, step)
    assert [line["data"] for line in jsonl(tmp_path)] == [{"ok": 1.0}] * 2
    assert sorted(record.getMessage() for record in caplog.records) == [
        "metric 'text' is a str, not a number: not logged",
        "metric 'vector' is a ndarray, not a number: not logged",
    ]


def test_every_name_that_the_configuration_allows_is_a_backend():
    from scalerl.config.schema import LOGGERS

    assert set(backend_names()) == set(LOGGERS)


def test_what_is_logged_may_be_changed_by_the_run_afterwards(tmp_path):
    with Tracking("p", "e", "file", run_dir=tmp_path) as tracking:
        metrics, row = {"x": 1.0}, ["a", 1.0]
        tracking.log(metrics, 1)
        tracking.log_table("t", ["c", "d"], [row], 1)
        metrics["x"], row[0] = 2.0, "b"
    assert jsonl(tmp_path)[0]["data"] == {"x": 1.0}
    assert json.loads((tmp_path / "tables/t/step_1.json").read_text())["data"] == [["a", 1.0]]


def test_tables_are_shown_in_one_line_per_row_and_kept_whole(tmp_path, capsys):
    rows = [["a\nb \x1b[2J", "x" * 500, 0.25]]
    with Tracking("p", "e", ["console", "file"], run_dir=tmp_path) as tracking:
        tracking.log_table("val/generations", ["prompt", "response", "score"], rows, step=7)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "val/generations at step 7:"
    assert shown[1].startswith(r"  prompt=a\nb \x1b[2J  response=xxx") and shown[1].endswith("x…  score=0.250")
    table = json.loads((tmp_path / "tables/val/generations/step_7.json").read_text())
    assert table == {"columns": ["prompt", "response", "score"], "data": rows}


def test_finish_takes_known_statuses_and_ends_logging(tmp_path):
    tracking = Tracking("p", "e", "file", run_dir=tmp_path)
    with pytest.raises(ValueError, match="'DONE', use one of FINISHED, FAILED, KILLED"):
        tracking.finish("DONE")
    tracking.log({"a": 1}, 1)
    tracking.finish()
    tracking.log({"a": 1}, 2)
    tracking.finish("FAILED")
    assert [line["step"] for line in jsonl(tmp_path)] == [1]
