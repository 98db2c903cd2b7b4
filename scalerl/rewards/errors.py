"""The one exception of this package."""

from __future__ import annotations


class RewardError(ValueError):
    """A reward function that cannot be loaded or called, or a sample that it cannot score."""
