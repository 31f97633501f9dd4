"""Kernels for a GPU. None was ever run on one: Triton's interpreter tests them."""
