"""What every command needs around its work: devices, signals, one run per directory, all problems in one message."""
