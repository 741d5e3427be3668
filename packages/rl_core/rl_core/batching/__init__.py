"""Batch math: layouts, micro-batch plans, packing, segments, dynamic sampling."""
