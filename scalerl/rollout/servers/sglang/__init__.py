"""Code that runs inside an SGLang server's processes, and where such a server stores tensors."""
