"""Stores of checkpoints: a folder that all ranks share, or below an fsspec URL."""
