"""When the last test of a folder is over. Its processes end then: those of the next folder need the memory.

pytest's scope "package" would do, but a folder without `__init__.py` is none to it.
"""

from __future__ import annotations

import pytest


def is_last_of_its_folder(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    return nextitem is None or nextitem.path.parent != item.path.parent
