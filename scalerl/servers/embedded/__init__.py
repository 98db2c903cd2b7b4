"""The embedded engine: transformers behind SGLang's HTTP protocol, on a CPU, exactly repeatable."""
