"""Known data sets in their original files -> the parquet files that `scalerl train` reads."""

from __future__ import annotations
