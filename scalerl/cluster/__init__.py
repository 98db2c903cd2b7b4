"""Ray: who runs where, processes that outlive a run, and calls on a group of workers as calls on its ranks."""
