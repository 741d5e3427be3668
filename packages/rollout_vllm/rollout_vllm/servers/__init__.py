"""vLLM server processes: command lines, start, watch, restart, control."""
