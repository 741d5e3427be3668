"""The rollout phase: generation, scoring, partial rollouts, server recovery."""
