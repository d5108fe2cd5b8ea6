"""Who of several operators works: the holder of one Lease.

In: the Lease as read, when it was first seen so, who asks, and the time. Out: the Lease to write,
or whom to wait for. Pure; leadership.py does the reading and writing.

The rules are those of Kubernetes' own components (client-go, tools/leaderelection): a candidate
does not trust the holder's clock, but waits until it has itself seen the same record for the whole
duration. A holder that could not renew for ``renew_deadline`` stops before anybody may replace it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from plimsoll_operator.observed import Json


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds; the defaults are those of kube-controller-manager."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0


@dataclass(frozen=True)
class Seen:
    """A record of the Lease (its resource version stands for all of it), and when it was first
    seen, on the candidate's own monotonic clock."""

    version: str
    at: float


@dataclass(frozen=True)
class Claim:
    """``body`` is the Lease to write, None while ``holder`` has it."""

    body: Json | None
    seen: Seen | None
    holder: str | None


def claim(
    live: Json | None,
    seen: Seen | None,
    identity: str,
    times: LeaseTimes,
    *,
    now: float,
    wall_clock: float,
) -> Claim:
    """What a candidate or the holder does next. ``live`` None: there is no Lease yet."""
    stamp = datetime.fromtimestamp(wall_clock, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    mine: Json = {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(times.duration),
        "renewTime": stamp,
    }
    if live is None:
        return Claim({"spec": {**mine, "acquireTime": stamp, "leaseTransitions": 0}}, None, None)
    spec: Json = live.get("spec") or {}
    holder, version = spec.get("holderIdentity") or None, live["metadata"]["resourceVersion"]
    if holder == identity:
        return Claim(_with_spec(live, {**spec, **mine}), None, identity)
    if seen is None or seen.version != version:
        seen = Seen(version, now)
    # Who wrote the record said how long it is good for.
    expired = now - seen.at >= (spec.get("leaseDurationSeconds") or times.duration)
    if holder is not None and not expired:
        return Claim(None, seen, holder)
    transitions = int(spec.get("leaseTransitions") or 0) + 1
    taken = {**spec, **mine, "acquireTime": stamp, "leaseTransitions": transitions}
    return Claim(_with_spec(live, taken), seen, holder)


def release(live: Json) -> Json:
    """The Lease without a holder: whoever waits need not wait until it expires."""
    return _with_spec(live, {**live["spec"], "holderIdentity": "", "leaseDurationSeconds": 1})


def _with_spec(live: Json, spec: Json) -> Json:
    # With its resource version: when somebody else was quicker, the server refuses the write.
    return {**live, "spec": spec}
