"""Command line, exports of DeepSpeed checkpoints, merges of LoRA adapters."""
