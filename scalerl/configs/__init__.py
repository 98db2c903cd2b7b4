"""Hydra YAML groups. A file here holds only what differs from the defaults in `scalerl.config.schema`."""
