"""Reads DeepSpeed ZeRO checkpoints written by any number of ranks."""
