"""The long lane: which prompts are long, and what they leave to the others.

In: what the spec and the engines say of ceiling and cache. Out: lengths and shares, with where they
start. Pure sums: whether and when they move is the rules' (admission_rules.py).

A queue in order of arrival stops at the first request that does not fit, so one long prompt keeps
every short one behind it waiting. The engine's lane ends that: long prompts together take at most a
share of the cache, short ones may overtake. Of all settings that need no learning it is the
strongest known, together with a small watermark, and so it is where the tuner starts.
"""

from __future__ import annotations

from plimsoll_operator.tuning.bounds import Bounds
from plimsoll_operator.tuning.policy import TuningPolicy
from plimsoll_operator.tuning.values import LANE, Limits, Parameter, Settings


def long_prompt_tokens(bounds: Bounds, block_size: int, policy: TuningPolicy) -> int:
    """The longest prompt that is not long, in tokens, in whole blocks.

    Three things bound it, and the least counts. Two of the longest short prompts must fit side by
    side into what the lane leaves of the cache, else the short ones stand in each other's way.
    Where the ceiling is low, a quarter of it: nothing else would ever be long. And never more than
    8192 tokens, four steps of prefill at vLLM's default budget: a longer one cannot be expected to
    answer as soon as a short one does.
    """
    bound = float(policy.long_prompt_most)
    if bounds.top is not None:
        bound = min(bound, policy.long_prompt_of_ceiling * bounds.top)
    if bounds.pools:
        pool = min(pool.usable * pool.block_size for pool in bounds.pools)
        bound = min(bound, pool * (1 - policy.long_share) / policy.short_prompts_side_by_side)
    return max(block_size, int(bound) // block_size * block_size)


def start_lane(settings: Settings, tuned: Limits, bounds: Bounds, policy: TuningPolicy) -> Limits:
    """``tuned`` with the lane where it has none yet, as far as the user and the runtime allow."""
    start: dict[Parameter, float] = {
        Parameter.WATERMARK: policy.watermark,
        Parameter.LONG_PROMPT_SHARE: policy.long_share,
        Parameter.LONG_PROMPT_TOKENS: long_prompt_tokens(bounds, settings.block_size, policy),
    }
    for parameter in LANE:
        if not settings.may_move(parameter):
            tuned = tuned.moved(parameter, None)
        elif tuned.value(parameter) is None:
            tuned = tuned.moved(parameter, start[parameter])
    return tuned
