"""Generation on a set of rollout servers: requests are spread over them, and every sample comes back exactly once."""
