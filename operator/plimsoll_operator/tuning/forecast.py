"""How much the requests that run now will hold at the worst moment before they end.

In: what they hold, how many they are, and how long outputs have been. Out: tokens. After
"Past-Future" (LightLLM, ASPLOS'25): with the distribution of output lengths the most that a batch
will ever hold can be foretold, and is what decides whether another request fits. The engine knows
each request; here only their number is known, so the distribution of what is left of a running
request is that of a renewal process seen at an arbitrary time: P(left > r) = E[(L - r)+] / E[L].
"""

from __future__ import annotations

from plimsoll_operator.tuning.histogram import Histogram


def predict_peak(held: float, running: int, outputs: Histogram) -> float | None:
    """The peak in tokens, at least ``held``; None while no output length is known.

    When the part ``1 - s`` of the running have ended, each of the others has grown by ``r(s)``:
    together they hold ``running * s * (held / running + r)``. The largest of these over time.
    """
    lengths = outputs.middles()
    if not lengths or running <= 0:
        return None
    total = sum(weight for _, weight in lengths)
    mean = sum(length * weight for length, weight in lengths) / total
    each = held / running
    peak, left, begin, longer = held, 1.0, 0.0, 1.0
    # Between two lengths the share that still runs falls in a straight line: a parabola each.
    for length, weight in lengths:
        slope = longer / mean
        best = min(max((left / slope + begin - each) / 2, begin), length)
        peak = max(peak, running * (left - slope * (best - begin)) * (each + best))
        left, begin, longer = left - slope * (length - begin), length, longer - weight / total
        if longer <= 1e-9:
            break
    return peak


def most_that_fit(held: float, running: int, outputs: Histogram, pool: float) -> int | None:
    """How many requests like the running ones a cache of ``pool`` tokens carries to their end."""
    peak = predict_peak(held, running, outputs)
    return None if not peak else int(running * pool / peak)
