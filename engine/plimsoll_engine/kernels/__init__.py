"""Triton kernels, and nothing but kernels; ``ops`` launches them, ``reference`` has their twins."""
