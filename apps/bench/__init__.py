"""Benchmarks of whole runs: six ZeRO cases of PPO, and ZeRO-1 against ZeRO-2 across seeds."""
