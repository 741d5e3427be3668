"""What the servers are sent when an engine trains adapters: each weight with its adapter merged in.

`MergedSource(engine.whole_tensors())`: Hugging Face names, base + scale * B @ A. Servers then serve plain weights and
need to know nothing of adapters. The merging itself is ZeroSource's: at stage 3 a bucket's shards are gathered at once.
"""

from weight_sync import ZeroSource

__all__ = ["MergedSource"]

MergedSource = ZeroSource
