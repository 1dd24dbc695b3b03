"""What `inspect_kernels.py` and `tune.py` are made of: compiling without a device, reading what came of it, figures."""
