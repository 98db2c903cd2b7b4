"""What runs inside an SGLang server's process, and the stand-ins that let it run on a CPU."""
