"""Whole rollouts, as tables of steps: what the operator asks for, why, and what the controller has
made of it. The pictures have one letter for each ordinal, from 0 up: the template's, small while it
does not serve."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_operator.plan import StepReason, next_step
from support.statefulset_model import StatefulSetModel

# The template before is good: status says so once it has served everywhere.
GOOD = {"revision": {"lastKnownGood": "A"}}


def roll(
    model: StatefulSetModel,
    *,
    to: str = "B",
    works: bool = True,
    spare: bool = False,
    ticks: int = 30,
) -> list[str]:
    """Lines of ``reason: pods``, each time something turns. The canary is proven one tick after it serves, or
    given up one tick after it broke, as the passes around the planner would."""
    lines: list[str] = []
    proven = given_up = False
    applied = model.update == to
    for _ in range(ticks):
        seen = model.observe()
        step = next_step(seen, given_up=given_up, applied=applied, proven=proven, spare=spare)
        model.apply(step, to)
        applied = True
        model.tick()
        line = f"{step.reason}: {model.picture}"
        if not lines or lines[-1] != line:
            lines.append(line)
        canaries = [pod for pod in model.observe().pods if pod.revision == to]
        if canaries and works and all(pod.ready for pod in canaries):
            proven = True
        if (
            canaries
            and not works
            and any(pod.container and pod.container.restarts for pod in canaries)
        ):
            given_up = True
    return lines


TABLES: dict[str, tuple[StatefulSetModel, dict[str, Any], list[str]]] = {
    "a good template without a spare accelerator": (
        StatefulSetModel(3, status=GOOD),
        {},
        [
            "Canary: A A -",  # the highest goes first, nothing else moves
            "Canary: A A b",
            "Canary: A A B",  # it has proved itself
            "Rolling: A - B",
            "Rolling: A b B",
            "Rolling: - B B",  # one at a time
            "Rolling: b B B",
            "Rolling: B B B",
            "Settled: B B B",
        ],
    ),
    "a good template with a spare accelerator": (
        StatefulSetModel(2, status=GOOD),
        {"spare": True},
        [
            "Canary: A A b",  # one more than wanted: no capacity is lost
            "Canary: A A B",
            "Rolling: A - B",
            "Rolling: A b B",
            "Rolling: - B B",
            "Rolling: b B B",
            "Rolling: B B B",
            "Settled: B B",  # and the one too many goes
        ],
    ),
    "a spare accelerator that the scheduler does not give": (
        StatefulSetModel(2, nodes=2, status=GOOD),
        {"spare": True},
        [
            "Canary: A A b",  # finds no node
            "Canary: A A",  # so delete first it is
            "Canary: A -",
            "Canary: A b",
            "Canary: A B",
            "Rolling: - B",
            "Rolling: b B",
            "Rolling: B B",
            "Settled: B B",
        ],
    ),
    "SurgeFirst waits for a node and gives no capacity away": (
        StatefulSetModel(2, nodes=2, status=GOOD, spec={"rollout": {"type": "SurgeFirst"}}),
        {},
        ["Canary: A A b"],
    ),
    "a bad template": (
        StatefulSetModel(3, bad=frozenset("B"), status=GOOD),
        {"works": False},
        [
            "Canary: A A -",
            "Canary: A A b",  # crashes
            "RolledBack: A A b",  # first the partition that makes its successor an old one
            "RolledBack: A A a",
            "RolledBack: A A A",  # and there it stays
        ],
    ),
    "a bad template with a spare accelerator": (
        StatefulSetModel(2, bad=frozenset("B"), status=GOOD),
        {"works": False, "spare": True},
        ["Canary: A A b", "RolledBack: A A"],  # nobody has noticed
    ),
    "a bad template over a single replica": (
        StatefulSetModel(1, bad=frozenset("B"), status=GOOD),
        {"works": False},
        ["Rolling: -", "Rolling: b", "RolledBack: b", "RolledBack: a", "RolledBack: A"],
    ),
    "a single replica with a spare accelerator": (
        StatefulSetModel(1, status=GOOD),
        {"spare": True},
        [
            "Canary: A b",
            "Canary: A B",
            "Rolling: - B",
            "Rolling: b B",
            "Rolling: B B",
            "Settled: B",
        ],
    ),
    "a broken old pod at the bottom, which no partition can repair": (
        StatefulSetModel(3, broken=frozenset({0}), status=GOOD),
        {},
        [
            "Canary: a A -",
            "ReplaceBroken: a A b",  # OnDelete, so that it comes back with the new template
            "ReplaceBroken: b A B",
            "Canary: B A B",  # a canary too
            "Rolling: B - B",
            "Rolling: B b B",
            "Rolling: B B B",
            "Settled: B B B",
        ],
    ),
    "broken old pods alone: there is nothing to protect": (
        StatefulSetModel(2, bad=frozenset("A")),
        {},
        ["Rolling: a -", "ReplaceBroken: b b", "Rolling: B B", "Settled: B B"],
    ),
    "no canary is wanted": (
        StatefulSetModel(2, status=GOOD, spec={"rollout": {"canary": "Off"}}),
        {},
        [
            "Rolling: A -",
            "Rolling: A b",
            "Rolling: - B",
            "Rolling: b B",
            "Rolling: B B",
            "Settled: B B",
        ],
    ),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_whole_rollout(table: tuple[StatefulSetModel, dict[str, Any], list[str]]) -> None:
    model, arguments, lines = table
    assert roll(model, **arguments) == lines


@given(
    wanted=st.integers(2, 5),
    bad=st.booleans(),
    spare=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(["kill", "up", "down"]), st.integers(0, 4)),
        max_size=4,
    ),
)
@settings(max_examples=30, deadline=None)
def test_whatever_happens_an_unproven_template_costs_one_serving_pod(
    wanted: int, bad: bool, spare: bool, events: list[tuple[int, str, int]]
) -> None:
    """Pods are killed and the count is changed in the middle; in the end all pods have the good template
    of the two, and nothing moves any more."""
    model = StatefulSetModel(wanted, bad=frozenset("B" if bad else ""), status=GOOD)
    proven = given_up = False
    applied = False
    for time in range(80):
        for _, what, ordinal in (event for event in events if event[0] == time):
            if what == "kill":
                model.delete(ordinal)
            else:
                model.wanted = max(2, model.wanted + (1 if what == "up" else -1))
        step = next_step(
            model.observe(), given_up=given_up, applied=applied, proven=proven, spare=spare
        )
        model.apply(step, "B")
        applied = True
        model.tick()
        new = [pod for pod in model.observe().pods if pod.revision == "B"]
        if not proven and not any(event[0] <= time for event in events):
            assert len(new) <= 1
        proven = proven or (bool(new) and not bad and all(pod.ready for pod in new))
        given_up = given_up or (
            bad and any(pod.container and pod.container.restarts for pod in new)
        )
    good = "A" if bad else "B"
    assert model.picture == " ".join([good] * model.wanted)
    assert step.reason is (StepReason.ROLLED_BACK if bad else StepReason.SETTLED)
