"""The embedded engine: transformers behind SGLang's HTTP protocol, on a CPU, with exactly repeatable results."""
