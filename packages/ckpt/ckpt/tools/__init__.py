"""Command line, remote storage, universal checkpoints, exports of DeepSpeed checkpoints and LoRA adapters."""
