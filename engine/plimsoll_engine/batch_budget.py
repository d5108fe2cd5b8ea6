"""How many tokens a step may have after the device refused memory inside one.

In: the outcome of each step. Out: the budget of the next. Pure counting: no clock, no torch.
"""

from __future__ import annotations

# After so many steps without a refusal the budget doubles, up to the full one.
_STEPS_TO_RECOVER = 32
# A single chunk of at most so many tokens that is refused cannot be helped by a smaller batch.
MINIMAL_TOKENS = 16


class BatchBudget:
    """``tokens`` is None while there is nothing to hold back."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._good_steps = 0

    def refused(self, num_tokens: int, num_chunks: int) -> bool:
        """Halves what the refused step had. False when that step was minimal already."""
        self._good_steps = 0
        if num_chunks == 1 and num_tokens <= MINIMAL_TOKENS:
            return False
        self.tokens = max(1, num_tokens // 2)
        return True

    def succeeded(self, full: int) -> None:
        if self.tokens is None:
            return
        self._good_steps += 1
        if self._good_steps >= _STEPS_TO_RECOVER:
            self._good_steps = 0
            self.tokens = self.tokens * 2 if self.tokens * 2 < full else None
