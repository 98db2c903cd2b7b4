"""What the values of the rollout correction mean, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scalerl.config import compose
from scalerl.config.correction import RS_OPTIONS, corrects, is_bounds, rs_bounds
from scalerl.config.names import CORRECTION
from scalerl.config.schema import RolloutCorrectionConfig, domain_violations
from scalerl.config.schema.fields import Place, broken_checks

DOC = Path(__file__).parents[3] / "docs" / "configuration.md"


def violations(**keys) -> list[str]:
    config, prefix = RolloutCorrectionConfig(**keys), f"{CORRECTION}."
    outside = dict(domain_violations(config, prefix))
    checks = broken_checks(config, Place(prefix, wrong=frozenset(outside)))
    return [text.replace(CORRECTION, "p") for text in (*outside.values(), *checks)]


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, None),
        ({"quantization": "fp8"}, "token"),
        ({"quantization": "fp8", "rollout_is": "null"}, None),
        ({"quantization": "fp8", "rollout_is": "sequence"}, "sequence"),
    ],
)
def test_tokens_that_are_sampled_in_fp8_are_weighed(settings, weights):
    sections = {"quantization": "actor_rollout_ref.rollout", "rollout_is": CORRECTION}
    needed = [
        "data.train_files=a",
        "data.val_files=b",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.rollout.n=2",
    ]
    cfg = compose("ppo", needed + [f"{sections[name]}.{name}={value}" for name, value in settings.items()])
    assert cfg.algorithm.rollout_correction.rollout_is == weights


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(2.0, (None, 2.0)), (3, (None, 3.0)), ("2.5", (None, 2.5)), ("0.5_5.0", (0.5, 5.0)), ([0.5, 5], (0.5, 5.0))],
)
def test_a_number_truncates_and_a_band_zeroes(value, bounds):
    assert is_bounds(RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=value)) == bounds


@pytest.mark.parametrize(
    ("tests", "threshold", "bounds"),
    [
        ("token_k1", 2.0, {"token_k1": (0.5, 2.0)}),
        ("token_k1", [0.4, 2.0], {"token_k1": (0.4, 2.0)}),
        ("seq_mean_k1", "0.999_1.001", {"seq_mean_k1": (0.999, 1.001)}),
        (["seq_max_k2"], [0.1], {"seq_max_k2": (None, 0.1)}),
        ("token_k2, seq_sum_k3", 0.1, {"token_k2": (None, 0.1), "seq_sum_k3": (None, 0.1)}),
        ("token_k1,seq_mean_k3", "0.5_2.0,0.01", {"token_k1": (0.5, 2.0), "seq_mean_k3": (None, 0.01)}),
        (["seq_mean_k3", "token_k1"], [0.01, [0.5, 2]], {"seq_mean_k3": (None, 0.01), "token_k1": (0.5, 2.0)}),
        (["token_k1", "seq_sum_k1"], "0.5_2.0", {"token_k1": (0.5, 2.0), "seq_sum_k1": (0.5, 2.0)}),
        (None, None, {}),
    ],
)
def test_thresholds_go_to_their_tests(tests, threshold, bounds):
    config = RolloutCorrectionConfig(rollout_rs=tests, rollout_rs_threshold=threshold)
    assert rs_bounds(config) == bounds
    assert violations(rollout_rs=tests, rollout_rs_threshold=threshold) == []


@pytest.mark.parametrize("option", RS_OPTIONS)
def test_every_test_can_be_named(option):
    assert violations(rollout_rs=option, rollout_rs_threshold=2.0) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # What YAML and Hydra make of 0.5_5.
        ({"rollout_is_threshold": 0.55}, "p.rollout_is_threshold = 0.55: the upper bound of a ratio must be at"),
        ({"rollout_is_threshold": "5.0_0.5"}, "the upper bound of a ratio must be at least 1"),
        ({"rollout_is_threshold": "1.5_5.0"}, "the lower bound of a ratio must be above 0 and at most 1"),
        ({"rollout_is_threshold": [0, 5]}, "the lower bound of a ratio must be above 0"),
        ({"rollout_is_threshold": [0.1, 2, 3]}, "must be a number or a band"),
        ({"rollout_is_threshold": "low_high"}, "must be a number or a band"),
        ({"rollout_is_threshold": float("nan")}, "p.rollout_is_threshold = nan: must be a number"),
        ({"rollout_is_batch_normalize": True}, "there are no weights; set p.rollout_is=token"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "p.rollout_rs = token_k4: must be"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "p.rollout_rs = seq_max_k1: must be"),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": 2}, "each at most once"),
        ({"rollout_rs": "", "rollout_rs_threshold": 2}, "p.rollout_rs = '': must be"),
        ({"rollout_rs": "token_k1"}, "needed by token_k1, one for all or one each; set p.rollout_rs_threshold=[0.5,2]"),
        (
            {"rollout_rs": ["seq_mean_k1", "token_k2"]},
            "p.rollout_rs_threshold = null: needed by seq_mean_k1, token_k2, one for all or one each; set "
            "p.rollout_rs_threshold=[[0.999,1.001],0.01]",
        ),
        ({"rollout_rs_threshold": 2.0}, "there are no tests; set p.rollout_rs=seq_mean_k3"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 thresholds for 2 tests"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": [0.5, 2]}, "token_k2 needs one number above 0"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0}, "token_k3 needs one number above 0"),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 0.999}, "must be at least 1"),
        ({"rollout_token_veto_threshold": 1.0}, "p.rollout_token_veto_threshold = 1.0: must be null or above 0"),
        ({"bypass_mode": True, "rollout_is": "token"}, "p.rollout_is = token: p.bypass_mode takes"),
        (
            {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2},
            "rollout_rs = token_k1: p.bypass",
        ),
        ({"bypass_mode": True, "rollout_token_veto_threshold": 0.1}, "p.rollout_token_veto_threshold = 0.1: p.bypass"),
    ],
)
def test_what_is_refused_names_the_key_and_what_to_set(keys, message):
    messages = violations(**keys)
    assert len(messages) == 1 and message in messages[0], messages


def test_the_defaults_are_off_and_allowed():
    assert violations() == []


def documented_settings() -> list[list[str]]:
    """Second column of the table in docs/configuration.md, each code of it."""
    text = DOC.read_text(encoding="utf-8")
    section = text.partition("## Where sampler and trainer disagree")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ") and "=" in line]
    return [code.split() for cell in cells for code in re.findall("`([^`]+)`", cell)]


def test_every_documented_correction_is_a_configuration():
    all_settings = documented_settings()
    assert len(all_settings) > 8
    seen = []
    for settings in all_settings:
        keys = [f"algorithm.rollout_correction.{setting}" for setting in settings]
        required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
        correction = compose("ppo", [*required, "actor_rollout_ref.rollout.n=2", *keys]).algorithm.rollout_correction
        seen.append(correction)
        assert corrects(correction) is not correction.bypass_mode
    assert all(seen[at] != seen[before] for at in range(len(seen)) for before in range(at))
