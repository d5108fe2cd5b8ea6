"""All rules in their order: the first that moves something wins.

In: a :class:`Situation`. Out: one move of one limit, or nothing, and what a bound held back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from plimsoll_operator.tuning.admission_rules import (
    admit_less,
    admit_more,
    balance_lane,
    fit_lane,
    fit_share,
    hold_back_growth,
    let_more_run,
)
from plimsoll_operator.tuning.memory_rules import (
    answer_allocation_failure,
    keep_headroom,
    restore_batch,
    use_free_memory,
)
from plimsoll_operator.tuning.restarts import why_not_restart
from plimsoll_operator.tuning.situation import Proposal, Situation
from plimsoll_operator.tuning.values import OutcomeKind, Rule


def take_back_rejected(situation: Situation) -> Proposal | None:
    """An engine refused the newest change: back to where that limit was."""
    refusals = [
        outcome
        for _, outcome in sorted(situation.outcomes.items())
        if outcome.kind is OutcomeKind.REJECTED and outcome.revision == situation.revision
    ]
    if not refusals or not situation.history:
        return None
    change = situation.history[-1]
    if change.revision != situation.revision or change.before is None:
        return None
    if change.rule in (Rule.SPEC, Rule.MODE, Rule.REJECTED):
        return None
    return Proposal(
        change.parameter,
        change.before,
        change.before,
        Rule.REJECTED,
        f"{refusals[0].pod} refused: {refusals[0].reason}",
        "the limits that held before",
    )


# Safety, then what the running need to end, then memory that is free for the taking, then what
# users feel; last what has time.
RULES: tuple[Callable[[Situation], Proposal | None], ...] = (
    take_back_rejected,
    answer_allocation_failure,
    keep_headroom,
    hold_back_growth,
    use_free_memory,
    balance_lane,
    admit_less,
    admit_more,
    let_more_run,
    fit_lane,
    fit_share,
    restore_batch,
)


def first_move(situation: Situation) -> tuple[Proposal | None, tuple[Proposal, ...]]:
    """The first rule that moves something, and the proposals up to it that a bound, or the price of
    a restart, held back."""
    held_back: tuple[Proposal, ...] = ()
    for rule in RULES:
        proposal = rule(situation)
        if proposal is None:
            continue
        now = situation.value(proposal.parameter)
        if proposal.value != now and proposal.parameter not in situation.settings.live:
            why_not = why_not_restart(situation, proposal)
            if why_not is not None and now is not None:
                proposal = replace(proposal, value=now, limited=why_not)
        if proposal.limited is not None:
            held_back = (*held_back, proposal)
        if proposal.value != now:
            return proposal, held_back
    return None, held_back
