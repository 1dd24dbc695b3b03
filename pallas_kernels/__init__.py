"""Kernels for paged attention, written in Pallas, and the oracle that each of them is tested against.

`reference` is the oracle: obvious, slow, float32. `tpu` and `gpu` hold one kernel per job and backend. `tuning` chooses
block sizes from heuristics and from the measured values in `tuned/`.

This package knows arrays and JAX. It does not know of block pools, requests, models, or jpaged, which calls it.
"""
