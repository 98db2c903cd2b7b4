"""The version of the code that runs, as a checkpoint keeps it."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import scalerl

_LIMIT_S = 10.0


@functools.cache
def code_version() -> dict[str, str]:
    """The version of scalerl and, where it runs from a git repository, its commit, with +changes if files differ."""
    version = {"version": scalerl.__version__}
    repository = Path(scalerl.__file__).resolve().parent.parent
    if (repository / ".git").exists():
        try:
            changed = _git(repository, "status", "--porcelain", "--untracked-files=no", "--", "scalerl")
            version["commit"] = _git(repository, "rev-parse", "HEAD") + ("+changes" if changed else "")
        except (OSError, subprocess.SubprocessError):
            # Without git, or where git refuses a repository of another user.
            pass
    return version


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S).stdout.strip()
