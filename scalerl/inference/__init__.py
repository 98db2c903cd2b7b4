"""The commands `scalerl generate`, `eval`, `serve` and `chat`, which use a trained model and need no trainer."""
