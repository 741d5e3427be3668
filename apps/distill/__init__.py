"""On-policy distillation on DeepSpeed, vLLM and Ray."""
