"""The reward: 1 for the right number, 0 for anything else. Named in the config as custom_reward_function.path."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0
