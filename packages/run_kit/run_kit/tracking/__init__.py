"""Run tracking: run folder, metrics table, curves, rollout samples, TensorBoard, W&B, log and progress."""
