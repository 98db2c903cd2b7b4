"""What `scalerl data` writes and what scores it belong together: the ground truth, given as asked for, scores 1."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scalerl import cli
from scalerl.rewards import default_compute_score

GSM8K = {"question": "Two cars of $1,200?", "answer": "2 * 1200 = 2400\n#### $2,400"}
MATH = {"problem": "Half of 1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": 'Solve it. The last line is "Answer: $Answer".\n\n17 + 17?', "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


@pytest.mark.parametrize(
    ("name", "record", "prompt", "source", "right", "wrong"),
    [
        ("gsm8k", GSM8K, "question", "openai/gsm8k", "So\n#### {}", "So\n#### {}2"),
        ("math", MATH, "problem", "DigitalLearningGmbH/MATH-lighteval", r"So \boxed{{{}}}", r"So \boxed{{{}2}}"),
        ("dapo", DAPO, "prompt", "math_dapo", "So\nAnswer: {}", "So\nAnswer: {}2"),
    ],
)
def test_the_rule_of_prepared_rows_reads_their_ground_truth(tmp_path, name, record, prompt, source, right, wrong):
    asked = [{"content": "3?", "role": "user"}] if name == "dapo" else "3?"
    for split, row in (("train", record), ("test", record | {prompt: asked})):
        Path(tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    files = [str(tmp_path / f"{split}.jsonl") for split in ("train", "test")]
    assert cli.main(["data", name, "--local", *files, "--out", str(tmp_path / "out")]) == 0
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["data_source"] == source
    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
    scores = [default_compute_score(source, text.format(truth), truth, info) for text in (right, wrong)]
    right_score, wrong_score = (score["score"] if isinstance(score, dict) else score for score in scores)
    assert right_score == 1.0 and wrong_score <= 0.0
