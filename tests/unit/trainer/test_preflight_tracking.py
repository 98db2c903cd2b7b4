from __future__ import annotations

from importlib.util import find_spec

import pytest

from scalerl.config import ConfigError, compose
from scalerl.trainer.checks.preflight import check_ppo


@pytest.mark.skipif(find_spec("swanlab") is not None, reason="swanlab is installed here")
def test_a_tracking_backend_that_is_not_installed_is_refused_before_anything_starts(tmp_path):
    missing = [f"{key}={tmp_path / 'missing'}" for key in ("data.train_files", "data.val_files")]
    model = f"actor_rollout_ref.model.path={tmp_path / 'missing'}"
    cfg = compose("ppo", ["+recipe=[grpo,cpu]", *missing, model, "trainer.logger=[console,swanlab]"])
    with pytest.raises(ConfigError) as caught:
        check_ppo(cfg)
    messages = [text for text in caught.value.violations if "swanlab" in text]
    assert len(messages) == 1 and "pip install 'scalerl[swanlab]'" in messages[0]
