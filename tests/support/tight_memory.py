"""A runner that has little memory, in a process of its own: what else a process holds, and what its
allocator keeps of it, would be counted too.

In: a model's folder as argument. Out: on stdout, as JSON, how profiling a step that is too large ended.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from plimsoll_engine import host_memory
from plimsoll_engine.config import DeviceType, EngineConfig
from plimsoll_engine.model_runner import ModelRunner
from plimsoll_engine.termination import EngineFailure

# A step of 8192 tokens of a tiny model takes 36 to 42 MiB, so that the next, of 16384, is foretold to
# need more.
ROOM = 60 << 20


def load(model: str, **settings: Any) -> ModelRunner:
    runner = ModelRunner(EngineConfig(model=model, device=DeviceType.CPU, **settings), "cpu")
    runner.load()
    return runner


def profile_too_much(model: str) -> dict[str, Any]:
    # The first runner warms up what a process allocates once.
    runner = load(model)
    runner.profile(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512)
    runner.shutdown()
    runner.reclaim()
    del runner
    gc.collect()
    total = host_memory.used_bytes() + ROOM
    tight = load(model, device_memory=total)
    try:
        tight.profile(max_num_batched_tokens=32768, max_num_seqs=256, max_model_len=512)
    except EngineFailure as failure:
        return {
            "class": failure.failure_class,
            "phase": failure.phase,
            "flag": (failure.suggestion or {}).get("flag"),
            "peak": tight.device_use().peak,
            "total": total,
        }
    return {"class": None}


if __name__ == "__main__":
    print(json.dumps(profile_too_much(sys.argv[1])))
