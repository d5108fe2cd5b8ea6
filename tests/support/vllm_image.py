"""A stand-in for vLLM's image on the local cluster: the scripted ``vllm`` beside this module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

NAME = "vllm/vllm-openai:v0.11.0"


def build_images() -> dict[str, Any]:
    """For Cluster.up."""
    folder = str(Path(__file__).parent / "vllm_programs")
    entry = {
        "env": {"PATH": f"{folder}:{sys.prefix}/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        "readable": [folder, sys.prefix, sys.base_prefix],
    }
    return {NAME: entry}
