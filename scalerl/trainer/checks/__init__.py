"""Checks of a run before a device is held; `preflight` makes them."""
