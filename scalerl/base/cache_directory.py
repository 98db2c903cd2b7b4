"""Where copies of what is at URLs are kept: the setting alone, without what makes them (`data.local_copy`)."""

from __future__ import annotations

# A directory; for a job of several machines one that all of them share (ray.sbatch sets it).
CACHE_DIR_ENV = "SCALERL_CACHE_DIR"
