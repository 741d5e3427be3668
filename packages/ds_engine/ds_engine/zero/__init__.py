"""Everything that touches DeepSpeed's internals: optimizer, gradient accumulation, ZeRO-3 fetch and step."""
