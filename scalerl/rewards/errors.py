"""The one exception of this package."""

from __future__ import annotations

from scalerl.errors import UserError


class RewardError(UserError):
    """A reward function that cannot be loaded or called, or a sample that it cannot score."""
