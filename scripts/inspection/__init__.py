"""What `inspect_kernels.py` is made of: compiling without a device, reading the compiler's schedule, figures of it."""
