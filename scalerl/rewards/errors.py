"""The exception that this package raises."""

from __future__ import annotations

from scalerl.errors import UserError


class RewardError(UserError):
    """Raised for a reward function that cannot be loaded or called, or a sample that cannot be scored."""
