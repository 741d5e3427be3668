"""Evaluation of models, checkpoints and running servers: pass@k, majority votes, comparison."""
