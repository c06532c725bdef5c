"""Requests that arrive, wait, join a running batch and leave it, on the simulated clock: latencies and their causes."""
