"""Checkpoints as files, without Megatron: `store` is the directories, `torch_dist` and `pieces` read and write the
tensors in them, `digest` is how damage is found. What of a model goes there is `parallel/checkpoint.py`."""
