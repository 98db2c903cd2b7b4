"""Imported once by the fork server: the slow imports that every rank of every test would repeat."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from scalerl.parallel import platform  # noqa: E402

platform.install("cpu")

import scalerl.parallel.engine  # noqa: E402, F401
import tests.tiny_models  # noqa: E402, F401
