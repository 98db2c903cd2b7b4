"""`scalerl data`: known data sets and a user's own files become the parquet files that `scalerl train` reads."""

from __future__ import annotations
