"""Names that a file of the user's own may define: what can be said of them before that file runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from scalerl.config.rules.base import Rule
from scalerl.config.schema import LOGGERS
from scalerl.config.value_checks import show


def _known_loggers(cfg: Any) -> Iterator[str]:
    # With files of the user's own it is known once they are imported.
    unknown = [] if cfg.trainer.import_files else [name for name in cfg.trainer.logger if name not in LOGGERS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], LOGGERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        yield (
            f"trainer.logger = {show(cfg.trainer.logger)}: must be a list of {', '.join(LOGGERS)}, or of backends of "
            f"your own; there is no {', '.join(unknown)}{hint}; set for example trainer.logger=[console], or "
            "trainer.import_files to the file that registers it"
        )


KNOWN_LOGGERS = Rule(("trainer.logger", "trainer.import_files"), _known_loggers)
