"""How many tokens a step may have after the device refused memory inside one.

In: the outcome of each step. Out: the budget of the next. Pure counting: no clock, no torch.
"""

from __future__ import annotations

# After so many steps without a refusal the budget doubles, up to the full one.
_STEPS_TO_RECOVER = 32
# So many refusals in a row of a step of one token, and a smaller batch is no remedy.
_REFUSALS_OF_ONE_TOKEN = 3


class BatchBudget:
    """``tokens`` is None while there is nothing to hold back."""

    def __init__(self) -> None:
        self.tokens: int | None = None
        self._good_steps = 0
        self._refusals_of_one = 0

    def refused(self, num_tokens: int) -> bool:
        """Halves what the refused step had. False when that cannot help any more."""
        self._good_steps = 0
        self.tokens = max(1, num_tokens // 2)
        self._refusals_of_one = self._refusals_of_one + 1 if num_tokens == 1 else 0
        if self._refusals_of_one < _REFUSALS_OF_ONE_TOKEN:
            return True
        self._refusals_of_one = 0
        return False

    def succeeded(self, full: int) -> None:
        self._refusals_of_one = 0
        if self.tokens is None:
            return
        self._good_steps += 1
        if self._good_steps >= _STEPS_TO_RECOVER:
            self._good_steps = 0
            self.tokens = self.tokens * 2 if self.tokens * 2 < full else None
