"""The commands other than training: `scalerl init`, `data`, `generate`, `eval`, `serve`, `chat` and `doctor`."""
