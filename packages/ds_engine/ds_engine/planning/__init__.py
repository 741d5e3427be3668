"""Memory and collective plans, computed without processes."""
