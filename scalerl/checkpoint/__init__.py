"""Saving and loading training state. `store` is files alone; `megatron` reads and writes model and optimizer."""
