"""Import stand-ins with which unmodified SGLang runs on a CPU: `sgl_kernel` and `torchvision`.

There is also a `megatron` that cannot be imported, which SGLang takes for missing, and the metadata of a distribution,
whose entry point makes SGLang load `plugin.py`. This directory is on PYTHONPATH of server processes only, and never
with a GPU.
"""
