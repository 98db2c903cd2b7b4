"""What a checkpoint keeps of the user's own files, and what of them has changed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from scalerl.config import PPOConfig, SFTConfig, compose
from scalerl.trainer.saving.checkpoints import OWN_FILE_KEYS as KEYS
from scalerl.trainer.saving.checkpoints import OWN_FILES, changed_files, own_files


def configured(*keys: str) -> PPOConfig:
    return compose(
        "ppo", ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m", *keys], rules=False
    )


def test_files_with_another_text(tmp_path: Path) -> None:
    reward, loss, estimator, template = (tmp_path / name for name in ("reward.py", "loss.py", "gae.py", "chat.jinja"))
    for file in (reward, loss, estimator, template):
        file.write_text("before")
    cfg = configured(
        f"custom_reward_function.path={reward}",
        f"trainer.import_files=[{loss},{estimator}]",
        f"data.chat_template_path={template}",
    )
    # As a trainer state's file has it.
    state = json.loads(json.dumps({OWN_FILES: own_files(cfg)}))
    assert changed_files(state, cfg) == []
    reward.write_text("after")
    estimator.write_text("after")
    template.unlink()
    assert changed_files(state, cfg) == [
        f"trainer.import_files ({estimator})",
        f"custom_reward_function.path ({reward})",
    ]
    assert changed_files({}, cfg) == [], "an older version saved none"
    # Another file is another value of its key, which is said as such.
    cfg.custom_reward_function.path = str(loss)
    assert changed_files(state, cfg) == [f"trainer.import_files ({estimator})"]


def test_files_that_other_files_and_commands_name_are_a_runs_own(tmp_path: Path) -> None:
    """Classes of tools lie next to their list; a command names its script."""
    (tmp_path / "my_tools.py").write_text("class Mine: ...")
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: PythonTool}, {class_name: my_tools.Mine}]")
    tools = "actor_rollout_ref.rollout.program.tool_config_path"
    assert list(own_files(configured(f"{tools}={tmp_path}/tools.yaml"))[tools]) == [
        f"{tmp_path}/tools.yaml",
        f"{tmp_path}/my_tools.py",
    ]
    command = "actor_rollout_ref.rollout.program.command"
    cfg = configured(f"{command}='{sys.executable} {tmp_path}/my_tools.py --fast'")
    assert list(own_files(cfg)[command]) == [f"{tmp_path}/my_tools.py"]


@pytest.mark.parametrize("config", [PPOConfig, SFTConfig])
def test_every_key_of_such_a_file_is_known(config: type) -> None:
    """By its name: a key that ends so names data, a model or a checkpoint, which are compared otherwise, or is here.
    A command names files too."""
    others = r"^data\.(train|val)_files$|^trainer\.resume_from_path$|(^|\.)model\.path$|(model|adapter)_path$"
    named = {key for key in keys_of(config) if re.search(r"(path|_files)$", key) and not re.search(others, key)}
    assert named and named <= set(KEYS)
    assert config is SFTConfig or named == set(KEYS) - {"actor_rollout_ref.rollout.program.command"}


def keys_of(config: type, prefix: str = "") -> Iterator[str]:
    for name, of_type in get_type_hints(config).items():
        if is_dataclass(of_type):
            assert isinstance(of_type, type)
            yield from keys_of(of_type, f"{prefix}{name}.")
        else:
            yield prefix + name
