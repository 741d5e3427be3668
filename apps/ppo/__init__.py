"""Proximal policy optimisation (PPO) with a critic on DeepSpeed, vLLM and Ray."""
