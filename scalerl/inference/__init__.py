"""`scalerl generate` and `scalerl eval`: what needs a trained model and no trainer."""
