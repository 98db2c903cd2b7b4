"""docs/models.md shows the families that there are, and a file as it is."""

from __future__ import annotations

from pathlib import Path

import scalerl
from scalerl.models import FAMILIES

PACKAGE = Path(next(iter(scalerl.__path__)))
PAGE = (PACKAGE.parent / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_family_is_listed():
    assert [name for name in FAMILIES if f"| `{name}` |" not in PAGE] == []


def test_the_example_is_the_file():
    assert f"```python\n{(PACKAGE / 'models' / 'mixtral.py').read_text(encoding='utf-8')}```" in PAGE
