"""Reward models on DeepSpeed and Ray."""
