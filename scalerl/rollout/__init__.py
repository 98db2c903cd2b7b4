"""Generation on a set of rollout servers: which server takes a request, and every sample once."""
