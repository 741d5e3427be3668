"""Where weights come from: plain tensors, ZeRO shards, FP8-quantized."""
