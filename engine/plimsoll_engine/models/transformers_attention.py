"""The place in transformers' models where the engine attends instead of them.

transformers' attention interface gives every layer's queries, keys and values to a function that is
registered by name. Ours hands each such call to whoever runs the model at that moment: the decoder,
which writes to the paged cache and attends over it, or the trial that finds out what a model asks
for. It is asked for no masks: transformers makes none for an implementation that has no function for
them. This module knows neither the cache nor a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

IMPLEMENTATION = "plimsoll"


@dataclass(frozen=True)
class AttentionCall:
    # The layer's own module; transformers' layers carry their number as ``layer_idx``.
    module: Any
    # [1, heads, tokens, head_size]; keys and values with as many heads or fewer.
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: Any
    settings: dict[str, Any]


# A call -> [1, tokens, heads, head_size].
Handler = Callable[[AttentionCall], torch.Tensor]

_handler: ContextVar[Handler] = ContextVar("attention_handler")


@contextmanager
def attending(handler: Handler) -> Iterator[None]:
    """While it lasts, this thread's models attend through ``handler``."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    call = AttentionCall(module, query, key, value, attention_mask, settings)
    return _handler.get()(call), None


AttentionInterface.register(IMPLEMENTATION, _attend)
