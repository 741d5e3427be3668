"""Policy, value and entropy losses, and the weights that aggregate per-token losses."""
