from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalerl.tracking import Tracking
from scalerl.trainer.dumps import generations_table

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(run_dir: Path):
    """As TensorBoard reads a directory of event files."""
    reader = event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    reader.Reload()
    return reader


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(run_dir).Scalars(tag)]


def test_scalars_tables_and_configuration_are_read_back(tmp_path):
    config = {"optim": {"lr": 0.5}, "hub": {"token": "hf_1"}}
    with Tracking("p", "e", "tensorboard", config, run_dir=tmp_path) as tracking:
        for step in (1, 2):
            tracking.log({"critic/score/mean": step / 4, "val-core/a/reward/mean@4": 1.0}, step)
        tracking.log_table("val/generations", ["prompt", "score"], [["a|b\n<b>", 1.0]], 2)
    assert scalars(tmp_path, "critic/score/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "val-core/a/reward/mean@4") == [(1, 1.0), (2, 1.0)]
    (table,) = read(tmp_path).Tensors("val/generations")
    text = table.tensor_proto.string_val[0].decode()
    assert table.step == 2
    assert text == "| prompt | score |\n| --- | --- |\n| a\\|b<br>&lt;b> | 1.0 |"
    (config_text,) = read(tmp_path).Tensors("config")
    assert "| optim.lr | 0.5 |\n| hub.token | *** |" in config_text.tensor_proto.string_val[0].decode()


def test_a_table_of_samples_has_all_of_its_columns(tmp_path):
    extras = np.empty(2, dtype=object)
    extras[:] = [{"acc": 1.0}, {"pred": "a|b"}]
    columns = {"score": np.array([1.0, 0.0]), "data_source": np.array(["gsm8k", "math"]), "reward_extra": extras}
    table = generations_table(columns, [("1+1=", "2", "2"), ("x\ny", "<3", "7")])
    with Tracking("p", "e", "tensorboard", run_dir=tmp_path) as tracking:
        tracking.log_table("val/generations", *table, 4)
    (event,) = read(tmp_path).Tensors("val/generations")
    assert event.tensor_proto.string_val[0].decode().splitlines() == [
        "| prompt | response | ground_truth | score | data_source | acc | pred |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| 1+1= | 2 | 2 | 1.0 | gsm8k | 1.0 |  |",
        "| x<br>y | &lt;3 | 7 | 0.0 | math |  | a\\|b |",
    ]


@pytest.mark.parametrize(
    ("how", "steps", "expected"),
    [
        ({"resumed_from": 2}, (3, 4), [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]),
        # A run that lost a rank may repeat all of its steps.
        ({"restarted": True}, (1, 2), [(1, 11.0), (2, 12.0)]),
    ],
)
def test_a_run_replaces_the_steps_that_it_repeats(tmp_path, how, steps, expected):
    for own, added, logged in (({}, 0, (1, 2, 3)), (how, 10, steps)):
        with Tracking("p", "e", "tensorboard", run_dir=tmp_path, **own) as tracking:
            for step in logged:
                tracking.log({"x": step + added}, step)
    assert scalars(tmp_path, "x") == expected
