"""Starts a run: placement on devices, Ray, trainer ranks and rollout servers."""
