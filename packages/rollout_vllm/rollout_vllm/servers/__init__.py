"""vLLM servers: checks before a start, process trees, servers on Ray nodes, restarts, control routes."""
