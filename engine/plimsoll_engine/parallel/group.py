"""The collectives a decoder needs, for one rank alone and for several over torch.distributed.

In: a tensor per rank. Out: their sum, or their columns side by side on rank 0. This module knows
neither models nor how ranks are started.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Group(Protocol):
    rank: int
    size: int
    # Ranks of this pod, and the place of this one among them.
    local_size: int
    local_rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; may reuse ``tensor``."""

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """[rows, columns] of each rank, side by side in rank order; None on ranks other than 0."""

    def sum(self, value: int) -> int:
        """The same on all ranks, as is ``max``."""

    def max(self, value: int) -> int: ...


class LoneRank:
    rank = 0
    size = 1
    local_size = 1
    local_rank = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor

    def sum(self, value: int) -> int:
        return value

    def max(self, value: int) -> int:
        return value


class DistributedGroup:
    """Over torch.distributed's default group, which the rank has set up (gloo or NCCL)."""

    def __init__(self, device: torch.device, pod_ranks: range) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.local_size = len(pod_ranks)
        self.local_rank = pod_ranks.index(self.rank)
        # Entered so far.
        self.collectives = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self.collectives += 1
        dist.all_reduce(tensor)
        return tensor

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor | None:
        tensor = tensor.contiguous()
        self.collectives += 1
        if self.rank != 0:
            dist.gather(tensor, dst=0)
            return None
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.gather(tensor, parts, dst=0)
        return torch.cat(parts, dim=-1)

    def sum(self, value: int) -> int:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        tensor = torch.tensor(value, dtype=torch.int64, device=self._device)
        self.collectives += 1
        dist.all_reduce(tensor, operation)
        return int(tensor)
