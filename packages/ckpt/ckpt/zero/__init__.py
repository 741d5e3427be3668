"""Reading DeepSpeed ZeRO checkpoints, for any number of ranks."""
