"""Access to DeepSpeed's internals: configuration, optimizer, gradient accumulation, ZeRO-3 gather and hooks, memory."""
