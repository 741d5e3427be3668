"""The model on one rank: loading, packed forward, attention, LoRA, NF4, sequence parallelism, recomputation."""
