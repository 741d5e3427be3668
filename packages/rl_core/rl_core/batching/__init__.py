"""Batch layouts, micro-batch plans, packing, flat rows and the batch functions of DAPO."""
