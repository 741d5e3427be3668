"""Group relative policy optimization (GRPO) on DeepSpeed, vLLM and Ray."""
