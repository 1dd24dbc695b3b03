"""GPU kernels by what ptxas makes of them."""
