"""Paged attention for TPUs in Pallas: `attention` is the way in, docs/kernels.md the guide."""
