"""Background savers: state capture, host copies, hashing while writing, per-rank files."""
