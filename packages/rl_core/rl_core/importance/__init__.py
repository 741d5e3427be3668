"""Importance weights and mismatch metrics between rollout engine and trainer."""
