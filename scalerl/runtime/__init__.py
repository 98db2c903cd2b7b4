"""Services that every command needs: devices, signals, a lock per directory, problems collected in one message."""
