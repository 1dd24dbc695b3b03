"""Kernels for paged attention, written in Pallas, and the oracle that each of them is tested against.

`reference` is the oracle: obvious, slow, float64. The kernels are to come.

This package knows arrays and JAX. It does not know of block pools, requests or models.
"""
