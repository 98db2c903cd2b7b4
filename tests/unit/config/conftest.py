"""The rules are tried on a machine of eight devices, whatever this one has."""

from __future__ import annotations

import pytest

from scalerl.config.schema import devices


@pytest.fixture(autouse=True)
def eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "devices_here", lambda device: 8)
