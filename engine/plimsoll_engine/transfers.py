"""Copies between host and device that nobody waits for, and a mark that can be waited at.

In: arrays on the host, tensors on the device. Out: the same on the other side. On CUDA a copy is
queued behind the work before it, out of or into memory that the device reaches by itself; on the
CPU there is nothing to copy and nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    # Out of pageable memory the host would wait for all that is queued.
    return tensor.pin_memory().to(device, non_blocking=True)


def indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [values]"""
    return to_device(np.asarray(values, dtype=np.int64), device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Holds the values once a later ``Mark`` has been waited at."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Mark:
    """The work of a device up to here."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
