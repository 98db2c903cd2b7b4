"""Checkpoints as files, without Megatron.

`store` has the directories, `torch_dist` and `pieces` read and write the tensors in them with digests, and `errors`
names damage. Which parts of a model are saved is decided in `parallel/checkpoint.py`.
"""

from __future__ import annotations

# File with the digests of files of tensors, left by their writers (`pieces`).
PIECES_INDEX_NAME = "pieces.json"
