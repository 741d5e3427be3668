"""Replacements of parts of vLLM that compute the same in less time; `rollout.fast_paths` turns them off together."""
