"""Forecast of a training step on a cluster, without starting anything."""
