"""The commands beside training: `scalerl init`, `data`, `generate`, `eval`, `serve`, `chat` and `doctor`."""
