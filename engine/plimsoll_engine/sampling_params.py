"""How a request wants its tokens chosen and when it stops. Values only; validated at the door.

The names are the OpenAI API's and vLLM's. This module knows neither HTTP nor torch: the server
builds these from a request body, the executor reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Grammar:
    """``text`` is llguidance's JSON, ``compiled`` what ``grammar`` makes of it, which stays in its
    process."""

    text: str
    compiled: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    # 0 is greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    # None: no limit.
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    # The model's end tokens (from generation_config) unless ignore_eos, and the request's own.
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: tuple[tuple[int, float], ...] = ()
    # None: none wanted; 0: the chosen token's alone.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # What the output must follow; None: any text.
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """``prompt_token_ids`` is never empty; every id is below ``ModelLimits.vocab_size``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    # Unix seconds at which the server received it.
    arrival_time: float
    # Smaller is served first.
    priority: int = 0
    # Requests find each other's cached blocks only under the same salt.
    cache_salt: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
