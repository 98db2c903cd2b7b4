"""The memory that a run takes on each device, from its configuration and config.json alone: no device, no weights."""
