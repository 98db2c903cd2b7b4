"""Code that runs inside an SGLang server's processes, and the stand-ins with which it runs on a CPU."""
