"""Where checkpoints are published: a folder that all ranks share, or below an fsspec URL."""
