from __future__ import annotations

import re
from pathlib import Path

from scalerl.rewards import default_score, manager

DOC = Path(__file__).parents[3] / "docs" / "rewards.md"


def test_the_code_of_the_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_score, "_RULES", dict(default_score._RULES))
    monkeypatch.setattr(manager, "_MANAGERS", dict(manager._MANAGERS))
    blocks = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2 and blocks[0].startswith("# my_reward.py\n")
    (tmp_path / "my_reward.py").write_text(blocks[0])
    variables = {"__name__": "doc"}
    for block in blocks[1:]:
        exec(compile(block, str(DOC), "exec"), variables)
