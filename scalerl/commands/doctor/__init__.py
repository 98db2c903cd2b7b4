"""`scalerl doctor`: what is installed and what this machine has."""
