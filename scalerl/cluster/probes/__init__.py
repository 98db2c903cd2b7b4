"""Probes of a machine: each tries one thing that a run needs and returns a `Finding`.

`scalerl doctor`, the check before a run and the check on each node of a Slurm job make the same probes.
"""

from scalerl.cluster.probes.finding import Finding, side_by_side

__all__ = ["Finding", "side_by_side"]
