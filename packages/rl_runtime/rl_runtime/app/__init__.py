"""A reinforcement-learning job: configuration, preflight checks, inputs, and the run itself."""
