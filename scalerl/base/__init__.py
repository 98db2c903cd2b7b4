"""What stands below all: files, signals, locks, environments, users' own files; nothing of it knows a configuration."""
