"""What the driver calls on workers and servers: the training side and the sampling side of a run."""
