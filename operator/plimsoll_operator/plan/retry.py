"""When a template that was given up is worth one more start.

In: why and when it was given up, and when an engine last died. Out: a time, or None. Pure and
stateless: the tries lie on a fixed grid after the stall (5, 15, 35, 75, 135, 195 ... minutes: each
pause is twice the one before, an hour at most), and a death shows that those before it are used up.
"""

from __future__ import annotations

from plimsoll_operator.tuning.values import FailureClass

FIRST_PAUSE_SECONDS = 300.0
LONGEST_PAUSE_SECONDS = 3600.0

# What may be cured without another template: the folder, the claim or the token appears; the
# tuner's bounds are widened, or a neighbour leaves the device. The others fail the same way again.
_CURABLE = frozenset(
    {
        FailureClass.MODEL_LOAD_FAILED,
        FailureClass.KV_TOO_SMALL_FOR_MAX_LEN,
        FailureClass.CUDA_OOM_AT_START,
    }
)


def next_try(reason: str, *, stalled_at: float, died_at: float) -> float | None:
    """The first time on the grid that no death has used up; it may have passed already, then the
    try is due or runs. None: only another template can help."""
    if reason not in _CURABLE:
        return None
    pause, time = FIRST_PAUSE_SECONDS, stalled_at + FIRST_PAUSE_SECONDS
    while time <= died_at:
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        time += pause
    return time
