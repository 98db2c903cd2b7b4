"""docs/metrics.md lists every key that this package makes; tests/e2e compares every run's keys with its patterns."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from scalerl import algorithms
from scalerl.config.schema import RolloutCorrectionConfig
from scalerl.tracking import metrics
from scalerl.tracking.chart_sections import SECTIONS

DOC = Path(__file__).parents[4] / "docs" / "metrics.md"


def patterns(text: str) -> list[re.Pattern[str]]:
    """Of the first column of the tables: {a,b} expands, {name} is anything, N a number."""
    regexes = []
    for line in text.splitlines():
        cell = line.split("|")[1].strip() if line.startswith("| `") else ""
        key = cell.strip("`")
        if "/" not in key:
            continue
        pieces = re.split(r"\{([^}]*)\}", key)
        options = [piece.split(",") if at % 2 else [piece] for at, piece in enumerate(pieces)]
        for words in itertools.product(*options):
            regex = ""
            for at, word in enumerate(words):
                is_name = at % 2 and "," not in pieces[at]
                regex += ".+?" if is_name else re.sub(r"@N\b", r"@\\d+", re.escape(word))
            regexes.append(re.compile(regex + r"\Z"))
    return regexes


def test_the_charts_that_come_first_are_of_metrics_that_runs_log():
    documented = patterns(DOC.read_text(encoding="utf-8"))
    for section, charts in SECTIONS:
        for key in charts:
            example = key.replace("*", "x/x/mean@4" if key.startswith("val-core") else "x")
            assert any(pattern.match(example) for pattern in documented), f"{section}: {key}"


def made_keys() -> set[str]:
    samples = {
        "score": np.ones(2),
        "prompt_length": np.ones(2, dtype=int),
        "response_length": np.array([2, 1]),
        "finish_reason": np.array(["stop", "length"], dtype=object),
    }
    timing = {name: 1.0 for name in ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")}
    logprobs = torch.tensor([-1.0, -2.0])
    packed = (logprobs, logprobs, torch.ones(2), torch.tensor([0, 2]))
    correction = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_mean_k3",
        rollout_rs_threshold=2.0,
        rollout_token_veto_threshold=0.1,
    )
    return {
        *metrics.compute_data_metrics(samples, np.ones(2), 1, 2),
        *metrics.compute_timing_metrics(timing | {"gen/reward": 1.0, "step": 8.0, "untimed": 1.0}, 1, 1),
        *metrics.compute_throughput_metrics(1, 1.0, 1),
        *metrics.memory_metrics(),
        *metrics.rollout_diff_metrics(metrics.rollout_diff_sums(logprobs, logprobs, torch.ones(2))),
        *metrics.token_stat_sums("critic/values", logprobs, torch.ones(2)),
        *metrics.explained_variance_metrics(metrics.explained_variance_sums(logprobs, logprobs, torch.ones(2))),
        *metrics.mismatch_metrics(*packed),
        *algorithms.rollout_corr_metrics(algorithms.correct(*packed, correction).metrics),
        *metrics.validation_metrics(
            ["a/b"] * 4, [0] * 4, [0.0, 1.0] * 2, [{"acc": True, "pred": "x", "len": 5}] * 4, [False] * 4
        ),
    }


def test_every_key_is_documented():
    known = patterns(DOC.read_text(encoding="utf-8"))
    assert sorted(key for key in made_keys() if not any(pattern.match(key) for pattern in known)) == []


@pytest.mark.parametrize(
    ("key", "documented"),
    [("a/x", True), ("a/y", True), ("a/z", False), ("b/any/t@12", True), ("b/any/t@N", False), ("b/t@12", False)],
)
def test_patterns_read_the_tables(key, documented):
    known = patterns("| `a/{x,y}` | two |\n| `b/{name}/t@N` | numbers |\n`a/z` in prose")
    assert any(pattern.match(key) for pattern in known) is documented
