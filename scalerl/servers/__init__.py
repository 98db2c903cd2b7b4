"""Rollout servers: the engines, their processes and who restarts them, clients, requests, and weights on the wire.

Imports nothing itself: `servers.supervise` must start in a fraction of a second.
"""
