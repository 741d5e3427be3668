"""Tensor sources: modules (FSDP2 included), Hugging Face folders, DeepSpeed ZeRO, blockwise FP8."""
