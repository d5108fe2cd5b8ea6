"""Plain-torch twins of the kernels: what the kernels are tested against, and what runs on the CPU."""
