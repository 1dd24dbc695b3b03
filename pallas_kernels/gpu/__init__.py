"""Attention of a ragged batch on NVIDIA GPUs, by Pallas' Mosaic GPU kernels: read `attention` first."""
