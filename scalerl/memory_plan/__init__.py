"""What a run takes of each device's memory, from its configuration and config.json alone: no device, no weights."""
