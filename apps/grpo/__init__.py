"""Group relative policy optimisation (GRPO) on DeepSpeed, vLLM and Ray."""
