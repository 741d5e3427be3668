"""Supervised fine-tuning on DeepSpeed and Ray."""
