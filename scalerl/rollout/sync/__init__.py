"""The hand-over between trainer and servers: weights go to the servers, device memory goes back and forth."""
