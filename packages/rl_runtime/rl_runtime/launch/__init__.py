"""Starting a run: placement on devices, Ray, ranks and rollout servers."""
