"""The training loop, the policy loss, metrics, the record of a run and checkpoints."""
