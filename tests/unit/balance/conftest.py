"""No deadline per example: how long one takes says how busy the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("scalerl", deadline=None)
settings.load_profile("scalerl")
