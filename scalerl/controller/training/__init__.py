"""The trainer's side: what the ranks do, and their roles as the loop calls them."""
