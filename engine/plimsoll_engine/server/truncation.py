"""Prompts that are cut instead of refused: ``truncate_prompt_tokens`` and ``truncation_side``.

In: what a request says, and the length that the model serves. Out: how many tokens stay and from which
end, or an HTTP 400. As in vLLM a prompt loses its start unless the request says otherwise. This module
knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll_engine.server.errors import invalid_value
from plimsoll_engine.server.protocol import GenerationRequest


@dataclass(frozen=True)
class Truncation:
    """At most ``length`` tokens stay; what goes is on ``side``, left or right."""

    length: int
    side: str

    def cut(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[-self.length :] if self.side == "left" else tokens[: self.length]

    def cut_text(self, text: str, num_characters: int) -> str:
        """What may become tokens that stay, when no ``length`` tokens have more characters."""
        return text[-num_characters:] if self.side == "left" else text[:num_characters]


def read_truncation(
    request: GenerationRequest, *, ceiling: int, output_tokens: int
) -> Truncation | None:
    """None: a prompt that is too long is refused. -1 cuts it to what leaves room for
    ``output_tokens`` within ``ceiling``. Raises ApiError(400)."""
    length = request.truncate_prompt_tokens
    if length is None:
        return None
    if length == 0 or length > ceiling:
        raise invalid_value("truncate_prompt_tokens", length, f"-1, or 1 to {ceiling}")
    if length == -1:
        length = max(1, ceiling - output_tokens)
    return Truncation(length, request.truncation_side or "left")
