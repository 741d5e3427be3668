"""Multi-turn episodes with tools, reward functions in worker processes, rewards over HTTP."""
