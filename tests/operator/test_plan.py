from dataclasses import replace
from typing import Any

import pytest

from plimsoll_operator.observed import Pod, StatefulSet
from plimsoll_operator.plan import StepReason, next_step
from support.resources import llmdeployment, observed, pod, statefulset

CRASHING = {"reason": "CrashLoopBackOff"}
NO_IMAGE = {"reason": "ImagePullBackOff", "message": "not found"}


def old(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="old", **state)


def new(ordinal: int, **state: Any) -> Pod:
    return pod(f"assistant-{ordinal}", revision="new", **state)


ROLLING = statefulset(replicas=2, current="old", update="new")


@pytest.mark.parametrize(
    ("found", "pods", "reason", "replaced"),
    [
        # no StatefulSet yet: make one
        (None, (), StepReason.ROLLING, []),
        # everything has the template of the cluster: only follow the count
        (statefulset(replicas=2), (new(0), new(1)), StepReason.SETTLED, []),
        # a crash of a pod with the wanted template is the kubelet's to restart
        (statefulset(), (new(0, ready=False, waiting=CRASHING),), StepReason.SETTLED, []),
        # an old pod that is away comes back with the new template
        (ROLLING, (new(1),), StepReason.ROLLING, []),
        # broken old pods never block: crash, image, unschedulable, ended
        (
            ROLLING,
            (old(0, ready=False, waiting=CRASHING), new(1, ready=False)),
            StepReason.REPLACE_BROKEN,
            ["assistant-0"],
        ),
        (
            ROLLING,
            (old(0, ready=False, waiting=NO_IMAGE), old(1, ready=False, waiting=NO_IMAGE)),
            StepReason.REPLACE_BROKEN,
            ["assistant-0", "assistant-1"],
        ),
        (
            ROLLING,
            (old(0, ready=False, unschedulable="0/1 nodes"), new(1)),
            StepReason.REPLACE_BROKEN,
            ["assistant-0"],
        ),
        (
            ROLLING,
            (old(0, ready=False, terminated={"exitCode": 1}), new(1)),
            StepReason.REPLACE_BROKEN,
            ["assistant-0"],
        ),
        # one that is going already needs no second delete
        (
            ROLLING,
            (old(0, ready=False, waiting=CRASHING, deleting=True), new(1)),
            StepReason.ROLLING,
            [],
        ),
        # the controller has not seen the new template: a deleted pod would come back old
        (
            statefulset(
                replicas=2, current="old", update="new", generation=2, observed_generation=1
            ),
            (old(0, ready=False, waiting=CRASHING), new(1)),
            StepReason.ROLLING,
            [],
        ),
        # nor is it clear what it would come back with while somebody else's template is there
        (
            replace(ROLLING, foreign=True),
            (old(0, ready=False, waiting=CRASHING), new(1)),
            StepReason.ROLLING,
            [],
        ),
        # nor while a partition still protects the old template
        (
            statefulset(replicas=1, partition=1, current="old", update="new"),
            (old(0, ready=False, waiting=CRASHING),),
            StepReason.ROLLING,
            [],
        ),
    ],
)
def test_rollout_steps(
    found: StatefulSet | None, pods: tuple[Pod, ...], reason: StepReason, replaced: list[str]
) -> None:
    seen = observed(llmdeployment(replicas=2), statefulset=found, pods=pods)

    step = next_step(seen, given_up=False)

    assert (step.replicas, step.partition, step.reason) == (2, 0, reason)
    assert [pod.name for pod in step.replace] == replaced


def never_served(ordinal: int) -> Pod:
    """Of the template before, which did not work either, or nobody knows that it did."""
    return old(ordinal, ready=False)


# Two of three have the old template, and the third could not start with the new one.
CUT = statefulset(replicas=2, partition=2, current="old", update="new")


@pytest.mark.parametrize(
    ("wanted", "found", "pods", "kept"),
    [
        # the first template ever does not work: nothing is left running
        (3, statefulset(replicas=2), (new(0, ready=False), new(1, ready=False)), 0),
        # and stays away
        (3, statefulset(replicas=0), (), 0),
        # a later one does not work: the old pods stay, the broken one goes
        (
            3, statefulset(replicas=3, current="old", update="new"),
            (never_served(0), never_served(1), new(2, ready=False)), 2,
        ),
        (3, statefulset(replicas=2, current="old", update="new"), (new(0), new(1)), 0),
        # once cut down, an old pod that is away for a moment does not shorten the set
        (3, CUT, (never_served(1),), 2),
        # whatever is wanted meanwhile, no kept pod gets the new template
        (2, CUT, (never_served(0), never_served(1)), 2),
        (1, CUT, (never_served(0), never_served(1)), 1),
        (0, CUT, (never_served(0), never_served(1)), 0),
        (9, CUT, (never_served(0), never_served(1)), 2),
        # also when it is wanted before the set was cut down
        (
            1, statefulset(replicas=3, current="old", update="new"),
            (never_served(0), never_served(1), new(2, ready=False)), 1,
        ),
        # a try that is over goes, and the kept ones stay
        (
            3, statefulset(replicas=3, partition=2, current="old", update="new"),
            (never_served(0), new(2, ready=False)), 2,
        ),
        (3, statefulset(replicas=1), (new(0, ready=False, waiting=CRASHING),), 0),
    ],
)  # fmt: skip
def test_a_template_that_was_given_up_keeps_only_older_pods(
    wanted: int, found: StatefulSet, pods: tuple[Pod, ...], kept: int
) -> None:
    seen = observed(llmdeployment(replicas=wanted), statefulset=found, pods=pods)

    step = next_step(seen, given_up=True)

    assert (step.replicas, step.partition) == (kept, kept)
    assert step.reason is StepReason.GIVEN_UP
    assert step.replace == ()


@pytest.mark.parametrize(
    ("wanted", "found", "pods", "replicas", "partition"),
    [
        # nothing serves: one pod is started, not all
        (3, statefulset(replicas=0), (), 1, 0),
        (3, statefulset(replicas=1), (new(0, ready=False),), 1, 0),
        # in the place of the missing replica
        (3, CUT, (never_served(0), never_served(1)), 3, 2),
        (9, CUT, (never_served(0), never_served(1)), 3, 2),
        (
            3, statefulset(replicas=3, partition=2, current="old", update="new"),
            (never_served(0), never_served(1), new(2, ready=False)), 3, 2,
        ),
        # never in that of a pod that is kept
        (2, CUT, (never_served(0), never_served(1)), 2, 2),
        (1, CUT, (never_served(0), never_served(1)), 1, 1),
        (0, statefulset(replicas=0), (), 0, 0),
    ],
)  # fmt: skip
def test_trying_again_costs_no_kept_pod(
    wanted: int, found: StatefulSet, pods: tuple[Pod, ...], replicas: int, partition: int
) -> None:
    seen = observed(llmdeployment(replicas=wanted), statefulset=found, pods=pods)

    step = next_step(seen, given_up=True, try_again=True)

    assert (step.replicas, step.partition) == (replicas, partition)
    assert (step.reason is StepReason.TRYING_AGAIN) is (replicas > partition)


@pytest.mark.parametrize(
    ("wanted", "found", "pods", "replaced"),
    [
        # the partition comes first: before it stands, a deleted pod would come back as it is
        (
            3, statefulset(replicas=3, partition=2, current="old", update="new"),
            (old(0), old(1), new(2, ready=False)), [],
        ),
        (
            3, statefulset(replicas=3, partition=3, current="old", update="new"),
            (old(0), old(1), new(2, ready=False)), ["assistant-2"],
        ),
        # a pod that answers goes as well: its template was found not to work
        (
            2, statefulset(replicas=2, partition=2, current="old", update="new"),
            (old(0), new(1)), ["assistant-1"],
        ),
        # nor before the controller has seen it
        (
            3, statefulset(
                replicas=3, partition=3, current="old", update="new",
                generation=4, observed_generation=3,
            ),
            (old(0), old(1), new(2, ready=False)), [],
        ),
        # another count is followed with the old template
        (5, statefulset(replicas=3, partition=3, current="old", update="new"), (old(0),), []),
        (1, statefulset(replicas=3, partition=3, current="old", update="new"), (old(0),), []),
        # what an older release had cut down gets its replicas back
        (3, CUT, (old(0), old(1)), []),
    ],
)  # fmt: skip
def test_a_template_that_fails_goes_back_to_the_one_that_served(
    wanted: int, found: StatefulSet, pods: tuple[Pod, ...], replaced: list[str]
) -> None:
    seen = observed(llmdeployment(replicas=wanted), statefulset=found, pods=pods)

    step = next_step(seen, given_up=True, try_again=True)

    assert (step.replicas, step.partition) == (wanted, wanted)
    assert step.reason is StepReason.ROLLED_BACK
    assert [pod.name for pod in step.replace] == replaced


def test_following_the_count_needs_no_rollout() -> None:
    for wanted in (0, 1, 5):
        seen = observed(
            llmdeployment(replicas=wanted), statefulset=statefulset(replicas=2), pods=(new(0),)
        )
        assert next_step(seen, given_up=False).replicas == wanted
