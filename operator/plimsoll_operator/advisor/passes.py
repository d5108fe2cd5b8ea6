"""One pass over one MemoryAdvisor.

In: the cluster, the pages, the key and what the last pass left in memory. Out: what to carry to the next
pass, and when it is due. The only thing ever written is the advisor's own status, with its Events.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_operator import cluster as api
from plimsoll_operator.advisor.advise import Known, advise
from plimsoll_operator.advisor.observe import observe
from plimsoll_operator.advisor.pages import Pages
from plimsoll_operator.advisor.record import read_known
from plimsoll_operator.advisor.status import build_invalid_status, build_status, events_of
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.observed import read_status
from plimsoll_operator.report import Reported, report
from plimsoll_operator.spec import InvalidSpec
from plimsoll_operator.workers import Key

# An object with a spec that cannot be read is looked at again when it changes, and now and then.
INVALID_INTERVAL_SECONDS = 60.0


@dataclass(frozen=True)
class Carried:
    """May be lost at any time: status has what was known as well."""

    known: Known
    reported: Reported | None


@dataclass(frozen=True)
class Passed:
    """``due_in`` in seconds."""

    carried: Carried | None
    due_in: float


async def run_pass(
    cluster: Cluster, pages: Pages, key: Key, *, carried: Carried | None, now: float
) -> Passed | None:
    """None when the MemoryAdvisor is gone or going. Three steps: observe, advise, report."""
    resource = await cluster.get(api.MEMORY_ADVISOR, *key)
    if resource is None or "deletionTimestamp" in resource["metadata"]:
        return None
    try:
        observed = await observe(cluster, pages, resource)
    except InvalidSpec as error:
        await report(cluster, resource, build_invalid_status(resource, str(error), now), now)
        return Passed(carried, INVALID_INTERVAL_SECONDS)
    known = read_known(read_status(resource), now) if carried is None else carried.known
    advised = advise(observed, known, now)
    status = build_status(observed, advised, now)
    last = None if carried is None else carried.reported
    reported = await report(cluster, resource, status, now, events=events_of(advised), last=last)
    return Passed(Carried(advised.known, reported), observed.advisor.metrics.interval)
