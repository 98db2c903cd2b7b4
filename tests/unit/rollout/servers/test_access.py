"""The key of a rollout server."""

from __future__ import annotations

import os

import pytest

from scalerl.rollout.servers.client import Replica
from scalerl.rollout.servers.connection import KEY_VARIABLE, authorization, is_authorized, new_key, take_key


def test_only_the_key_opens() -> None:
    key = new_key()
    assert is_authorized(authorization(key)["Authorization"], key)
    for header in (None, "", key, f"Basic {key}", f"Bearer {key[:-1]}", f"Bearer {new_key()}", "Bearer schlüssel"):
        assert not is_authorized(header, key)


def test_a_server_does_not_hand_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key")
    assert take_key() == "key"
    assert KEY_VARIABLE not in os.environ


def test_no_server_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=KEY_VARIABLE):
        take_key()


def test_a_replica_does_not_show_it() -> None:
    assert "secret" not in repr(Replica("http://a", "sglang", 1, "secret"))
