"""Everything on Ray: placing processes on devices, keeping them for the next run, and calling groups of workers."""
