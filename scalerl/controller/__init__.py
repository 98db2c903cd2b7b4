"""The training side and the sampling side of a run: what the driver calls, and the workers that it calls."""
