"""The training side of a run: what the ranks do, and their roles as the training loop calls them."""
