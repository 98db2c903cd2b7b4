"""Programs of the probes that import torch, SGLang or Transformer Engine; each prints one line of JSON."""
