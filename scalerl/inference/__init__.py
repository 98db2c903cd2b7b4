"""The commands `scalerl generate` and `scalerl eval`, which use a trained model and need no trainer."""
