"""Picks the executor for a configuration: one device, or tensor parallel ranks.

In: an EngineConfig. Out: an Executor that has loaded nothing yet. Importing this module imports no
torch: with several ranks the process that serves HTTP never needs it.
"""

from __future__ import annotations

from pathlib import Path

from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.executor import Executor


def build_executor(config: EngineConfig) -> Executor:
    """Raises EngineFailure when the device asked for is not there."""
    kind = device_kind(config.device)
    if config.tensor_parallel_size == 1:
        from plimsoll_engine.model_runner import ModelRunner

        return ModelRunner(config, kind)
    from plimsoll_engine.parallel.executor import TensorParallelExecutor

    return TensorParallelExecutor(config, kind)


def device_kind(device: DeviceType) -> str:
    """The text cpu or cuda; auto is CUDA where the driver is present and torch can use it."""
    if device is not DeviceType.AUTO:
        return device.value
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
