"""Kernels for paged attention, written in Pallas, and the oracle that each of them is tested against.

`reference` is the oracle: obvious, slow, float64. `tpu` and `gpu` have the kernels, `options` what both are asked
for, `tuning` says how they cut their work, and `cases` names the shapes that tests and scripts share.

This package knows arrays and JAX. It does not know of block pools, requests or models.
"""
