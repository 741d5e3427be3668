"""The training loop, the policy loss, metrics and run checkpoints."""
