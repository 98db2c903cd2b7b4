"""Conversion of well-known data sets from their original files to the parquet files that `scalerl train` reads."""

from __future__ import annotations
