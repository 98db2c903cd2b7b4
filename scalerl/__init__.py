"""Reinforcement learning of language models: Megatron-Core trains, SGLang generates, Ray controls."""

from __future__ import annotations

__version__ = "0.1.0"
