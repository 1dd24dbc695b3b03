"""TPU kernels by libtpu's own schedule."""
