"""Importance weights and rollout/trainer mismatch metrics."""
