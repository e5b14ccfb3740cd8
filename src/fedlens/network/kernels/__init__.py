"""Triton kernels for a GPU, and the operations with gradients that are made of them."""
