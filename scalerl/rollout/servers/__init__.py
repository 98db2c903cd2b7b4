"""Rollout servers: engines, processes and their restart, clients, requests, and the transfer of weights.

This file imports nothing, because `rollout.servers.supervise` must start in a fraction of a second.
"""
