"""The edge to verl: its keys, its launch scripts, its helper functions."""
