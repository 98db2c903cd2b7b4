"""Rules between keys, one file per section of the configuration."""
