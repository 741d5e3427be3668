"""Rollouts: generation, scoring, partial rollouts, server recovery."""
