"""Triton kernels for a GPU, and the differentiable operations that use them."""
