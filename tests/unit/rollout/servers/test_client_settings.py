"""The limits of a run's clients are those of its configuration."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import scalerl
from scalerl.config.schema import RolloutConfig
from scalerl.rollout.servers.client import ClientSettings, Replica, RolloutClient
from scalerl.rollout.servers.purpose import POLICY

PACKAGE = Path(scalerl.__file__).parent


def test_clients_have_the_limits_that_they_are_given() -> None:
    client = ClientSettings(POLICY, 64, 7.0, 3).client(Replica("http://127.0.0.1:1", "embedded", 1, "key"))
    assert (client.timeout_s, client.max_concurrency, client.max_model_len) == (7.0, 3, 64)
    # None has a default that a run could have without its configuration saying so.
    assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(ClientSettings))


def test_only_the_settings_make_clients() -> None:
    """A client that is made in another place has the defaults of the class, which are for direct use."""
    makers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "RolloutClient"
    }
    assert makers == {"rollout/servers/client.py"}


def test_the_defaults_of_direct_use_are_the_configurations() -> None:
    client = RolloutClient("http://127.0.0.1:1", "embedded", key="key", max_model_len=64)
    config = RolloutConfig()
    assert (client.timeout_s, client.max_concurrency) == (config.request_timeout_s, config.max_num_seqs)
