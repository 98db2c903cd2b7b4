"""Everything on Ray: placing processes on devices, keeping them for the next run, and calling groups of workers."""

import os

# Before Ray is imported, which reads it then. Under `uv run` Ray would pack the working directory, with checkpoints and
# data in it, upload it to every node, and refuse it where it is large. All nodes have scalerl: nothing is uploaded.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
