"""Proximal policy optimization (PPO) with a critic on DeepSpeed, vLLM and Ray."""
