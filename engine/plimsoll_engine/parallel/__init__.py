"""Tensor parallelism over torch.distributed: layers, ranks, and the executor that drives them."""
