"""One pass over one LLMDeployment.

In: the cluster, the engines, the key and what the last pass left in memory. Out: what to carry to
the next pass, and when it is due. Only here the parts meet; each part is pure, or only reads, or
only writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from plimsoll_operator import avoidance, checks, names, stall
from plimsoll_operator import cluster as api
from plimsoll_operator.apply import (
    Applied,
    ChildKey,
    Fruitless,
    apply_children,
    apply_profile,
    are_settled,
    difference,
)
from plimsoll_operator.checks import Violation
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.credentials import renew_credentials
from plimsoll_operator.desired import (
    WORKLOADS,
    build_children,
    build_template,
    template_of,
    workload_key,
)
from plimsoll_operator.desired.metadata import fingerprint
from plimsoll_operator.desired.prefetch_job import build_prefetch_job
from plimsoll_operator.desired.rollout import Rollout, build_rollout
from plimsoll_operator.desired.status import Report, build_invalid_status, build_status
from plimsoll_operator.engines import Engines
from plimsoll_operator.observe import observe, observe_spare
from plimsoll_operator.observed import Json, Observed, Pod
from plimsoll_operator.plan import StepReason, can_roll_back, next_step
from plimsoll_operator.plan.canary import Probe, judge_canary
from plimsoll_operator.plan.deadline import find_overdue
from plimsoll_operator.prefetch import judge_prefetch
from plimsoll_operator.probing import ask
from plimsoll_operator.report import Reported, is_news, report
from plimsoll_operator.spec import InvalidSpec
from plimsoll_operator.telemetry import Standing
from plimsoll_operator.tuning import decide
from plimsoll_operator.tuning.profile import profile_key, read_learned
from plimsoll_operator.tuning.record import read_state, record_tuning
from plimsoll_operator.tuning.restarts import restarts_of_the_day
from plimsoll_operator.tuning.settings import tuning_settings
from plimsoll_operator.tuning.values import (
    Change,
    EngineReading,
    Event,
    Failure,
    LimitsOutcome,
    OutcomeKind,
    TuningDecision,
    TuningInputs,
    TuningState,
    Unknown,
)
from plimsoll_operator.watch_cache import Reader
from plimsoll_operator.workers import Key

logger = logging.getLogger(__name__)

# An object with a spec that cannot be read is looked at again when it changes, and now and then.
INVALID_INTERVAL_SECONDS = 60.0


_ROTATED = Event(
    "CredentialsRotated",
    "the control channel has a new certificate and token, which engines take over without a restart",
)


@dataclass(frozen=True)
class Carried:
    """May be lost at any time: the tuner's state is in status too, the answers come again, and an
    apply that changed nothing is only repeated."""

    state: TuningState
    outcomes: Mapping[str, LimitsOutcome] = field(default_factory=dict)
    missing_since: float | None = None
    reported: Reported | None = None
    fruitless: Mapping[ChildKey, Fruitless] = field(default_factory=dict)
    probe: Probe | None = None


@dataclass(frozen=True)
class Passed:
    """``due_in`` in seconds; ``changes`` are the limits that this pass moved; ``read_all`` says that
    every engine that should serve was read; ``standing`` is for the operator's own metrics."""

    carried: Carried | None
    due_in: float
    standing: Standing
    changes: tuple[Change, ...] = ()
    read_all: bool = False


async def reconcile(
    cluster: Cluster,
    engines: Engines,
    key: Key,
    *,
    engine_image: str,
    operator_namespace: str | None = None,
    rotate_after: float | None = None,
    carried: Carried | None,
    now: float,
    remembered: Reader | None = None,
) -> Passed | None:
    """None when the LLMDeployment is gone or going: its children follow by their owner reference.

    Seven steps: observe, tune, plan, build, apply, check and report, move the engines' limits.
    Every step decides from what this pass observed, so a pass that was cut off is simply repeated.
    Credentials of the control channel are rotated ``rotate_after`` seconds after they were made (None: never).
    ``remembered`` answers without asking the cluster and may be behind: as soon as there is anything to
    write, the pass begins anew and looks for itself.
    """

    async def look_again() -> Passed | None:
        return await reconcile(
            cluster,
            engines,
            key,
            engine_image=engine_image,
            operator_namespace=operator_namespace,
            rotate_after=rotate_after,
            carried=carried,
            now=now,
        )

    resource = await cluster.get(api.LLM_DEPLOYMENT, *key)
    if resource is None or "deletionTimestamp" in resource["metadata"]:
        return None

    # 1. Observe.
    try:
        observed = await observe(remembered or cluster, cluster, resource, engine_image)
        template = build_template(observed.deployment, engine_image)
    except InvalidSpec as error:
        invalid = build_invalid_status(resource, str(error), now)
        await report(cluster, resource, invalid, now)
        standing = Standing(tuple(invalid["conditions"]))
        return Passed(carried, INVALID_INTERVAL_SECONDS, standing)
    deployment = observed.deployment
    serving = [pod for pod in observed.pods if pod.serves]
    readings = await engines.read(deployment, serving)
    failures = _failures(observed)
    applied = _has_template(observed, template)
    conflict = checks.foreign_children(observed) or checks.find_unusable(
        observed, api.LEADER_WORKER_SET.kind
    )
    lacking = checks.find_unusable(observed, api.INFERENCE_POOL.kind)

    # 2. Tune.
    learned = read_learned(observed.profile)
    settings = tuning_settings(deployment)
    decision = decide(
        TuningInputs(
            settings=settings,
            engines=readings,
            failures=tuple(f for f in failures if checks.concerns(f, observed, applied=applied)),
            state=read_state(observed.status) if carried is None else carried.state,
            learned=learned,
            now=now,
            outcomes={} if carried is None else carried.outcomes,
        )
    )

    # 3. Plan. What a model that is not there yet holds up stays as it is.
    job = ("Job", names.prefetch_job(deployment.name))
    fetch = judge_prefetch(
        build_prefetch_job(deployment, engine_image),
        observed.children.get(job),
        observed.prefetch_pods,
        observed.status,
        now,
    )
    blocked = stall.recorded_give_up(observed, applied=applied)
    try_at = stall.next_try(observed, blocked, failures, now)
    spare = (
        await observe_spare(cluster, deployment, template)
        if observed.statefulset is not None and not applied and not fetch.holds
        else None
    )
    current = checks.current_failures(observed.pods, failures)
    missing_since = checks.missing_since(
        observed, None if carried is None else carried.missing_since, now
    )
    canary, overdue, proven = None, None, stall.is_proven(observed)
    probe = None if carried is None else carried.probe
    if applied and blocked is None and not proven and stall.is_rolling(observed):
        canary = judge_canary(observed, failures=failures, readings=readings, probe=probe, now=now)
        proven = canary is not None and canary.proven
        if not proven and can_roll_back(observed):
            overdue = find_overdue(
                observed, canary, failures=current, missing_since=missing_since, now=now
            )
    step = next_step(
        observed,
        given_up=blocked is not None,
        try_again=try_at is not None and try_at <= now,
        applied=applied,
        proven=proven,
        spare=spare is not None and spare.fits,
    )

    avoided: list[Json] = []
    strays: tuple[Pod, ...] = ()
    if not deployment.in_groups:
        avoided = avoidance.find_avoided(observed, current, now)
        strays = avoidance.stranded(observed, current)
    replaced = (*step.replace, *strays)

    # 4. Build. What the runtime reads at its start alone is no limit to be sent.
    live_limits = decision.limits.only(settings.live)
    credentials = renew_credentials(
        observed.credentials, deployment, now, rotate_after=rotate_after
    )
    children = build_children(
        deployment,
        step=step,
        template=template,
        credentials=credentials,
        limits=live_limits,
        revision=decision.revision,
        operator_namespace=operator_namespace,
    )
    workload = children[workload_key(deployment)]
    if workload is not None and not deployment.in_groups:
        placement = avoidance.place(observed, step, avoided, applied=applied)
        children[workload_key(deployment)] = avoidance.placed(workload, placement)
    children[job] = fetch.job
    if lacking is not None:
        del children[api.INFERENCE_POOL.kind, deployment.name]
    if fetch.holds:
        # What makes the pods stays as it is, or absent, until the model is there.
        children = {key: body for key, body in children.items() if key[0] not in WORKLOADS}

    # 5. Apply. Nothing is written over somebody else's object, nor of a kind that is not there.
    if remembered is not None and (
        not are_settled(children, observed.children)
        or replaced
        or canary is not None
        or decision.learned != learned
    ):
        return await look_again()
    written = Applied()
    if conflict is None and remembered is None:
        fruitless = {} if carried is None else carried.fruitless
        written = await apply_children(cluster, children, observed.children, fruitless, now)
        for pod in () if fetch.holds else replaced:
            await cluster.delete(api.POD, deployment.namespace, pod.name, pod.uid)
    refusals = written.refusals if conflict is None else (conflict,)
    if fetch.failed is not None:
        refusals = (*refusals, fetch.failed)
    if decision.learned != learned:
        key_of_profile = profile_key(deployment, deployment.image or engine_image)
        await apply_profile(cluster, deployment.namespace, key_of_profile, decision.learned)

    # 6. Check and report.
    give_up = overdue if canary is None else canary.failure or overdue
    if decision.give_up is not None:
        give_up = Violation(decision.give_up.reason, decision.give_up.message)
    stalled = stall.find_stall(observed, applied=applied, refusals=refusals, give_up=give_up)
    shown = stalled and stall.tell(
        stalled, observed, failures, refused=bool(refusals), partition=step.partition, now=now
    )
    if canary is not None and canary.probe_tokens is not None and stalled is None:
        probe = await ask(cluster, engines, deployment, canary, probe)
    statefulset = observed.statefulset
    rollout = build_rollout(
        observed,
        Rollout(
            step,
            canary,
            probe,
            None if spare is None else spare.reason,
            statefulset.update_revision
            if statefulset is not None and canary is not None and canary.proven
            else None,
        ),
    )
    view = checks.View(
        observed=observed,
        failures=current,
        applied=applied,
        stall=shown,
        now=now,
        missing_since=missing_since,
        waiting=fetch.waiting,
        lacking=lacking,
        rollout=rollout["message"] if step.reason is StepReason.CANARY else "",
    )
    status = build_status(
        Report(
            view=view,
            verdicts=(*checks.judge(view), *decision.verdicts),
            failures=failures,
            engines=readings,
            limits=decision.limits,
            source=None if decision.unconfirmed else decision.source,
            recorded={
                **record_tuning(decision),
                **fetch.recorded,
                "avoidedNodes": avoided,
            },
            given_up=stalled is not None and stalled == give_up,
            rollout=rollout,
        )
    )
    events = (
        *decision.events,
        *avoidance.avoidance_events(observed.status.get("avoidedNodes", []), avoided),
    )
    if observed.statefulset is not None and not applied and not refusals and not fetch.holds:
        events = (_rolling_out(observed, template), *events)
    if (
        credentials.previous
        and observed.credentials
        and credentials.token != observed.credentials.token
    ):
        events = (_ROTATED, *events)
    last = None if carried is None else carried.reported
    if remembered is not None and (events or is_news(resource, status, now, last)):
        return await look_again()
    reported = await report(cluster, resource, status, now, events=events, last=last)

    # 7. Move the engines' limits, on those that have not got this revision yet.
    outcomes = dict(carried.outcomes) if carried is not None else {}
    behind = [pod for pod in serving if _is_behind(pod, readings, outcomes, decision)]
    if behind and observed.credentials is not None:
        outcomes |= await engines.set_limits(
            behind, observed.credentials, decision.revision, live_limits
        )
    names_now = {pod.name for pod in serving}
    kept = {pod: outcome for pod, outcome in outcomes.items() if pod in names_now}
    carry = Carried(decision.state, kept, missing_since, reported, written.fruitless, probe)
    read_all = all(isinstance(reading, EngineReading) for reading in readings.values())
    standing = Standing(
        tuple(status["conditions"]),
        _failed_at(failures),
        restarts_of_the_day(decision.state.history, settings.live, now),
        settings.max_restarts_per_day,
    )
    return Passed(carry, deployment.scrape_interval, standing, decision.changes, read_all)


def _failures(observed: Observed) -> tuple[Failure, ...]:
    found = (checks.find_failure(pod) for pod in observed.pods)
    return tuple(failure for failure in found if failure is not None)


def _failed_at(failures: Iterable[Failure]) -> dict[str, float]:
    """When each class was last seen; undated failures are no news."""
    dated = sorted((f.at, f.failure_class.value) for f in failures if f.at is not None)
    return {failure_class: at for at, failure_class in dated}


def _has_template(observed: Observed, template: Json) -> bool:
    """The cluster holds exactly this template."""
    statefulset = observed.statefulset
    return statefulset is not None and statefulset.template_hash == fingerprint(template)


def _rolling_out(observed: Observed, template: Json) -> Event:
    """Says why pods are replaced: the first thing that differs."""
    live = observed.children[workload_key(observed.deployment)]
    assert live is not None
    found = difference(template, template_of(live), "template")
    return Event("RollingOut", f"replacing the pods: {found or 'a field was removed'}")


def _is_behind(
    pod: Pod,
    readings: Mapping[str, EngineReading | Unknown],
    outcomes: Mapping[str, LimitsOutcome],
    decision: TuningDecision,
) -> bool:
    """A rejected revision is not sent again: the same request would be rejected again."""
    reading = readings[pod.name]
    if not isinstance(reading, EngineReading) or reading.limits_revision == decision.revision:
        return False
    last = outcomes.get(pod.name)
    rejected = last is not None and last.kind is OutcomeKind.REJECTED
    return not (rejected and last is not None and last.revision == decision.revision)
