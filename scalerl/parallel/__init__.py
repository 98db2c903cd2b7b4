"""Megatron: the model, its layouts, packed forward and backward, optimizer, and export of weights."""
