"""Ray: who runs where, and how a call on a group of workers becomes calls on its ranks."""
