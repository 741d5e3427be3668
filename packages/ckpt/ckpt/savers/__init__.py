"""Background saves: host copies, per-rank files, state dicts, DeepSpeed checkpoints, random generator states."""
