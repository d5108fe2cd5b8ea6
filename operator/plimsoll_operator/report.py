"""Writes the status of an object of ours and its Events, when it is time.

In: the object as read, its next status and Events. Out: requests to the API server, none while
nothing has happened, and what the next pass must know of the last write.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from plimsoll_operator import cluster as api
from plimsoll_operator.apply import apply_status, record_event
from plimsoll_operator.cluster import Cluster, Resource
from plimsoll_operator.desired.events import build_events
from plimsoll_operator.desired.rollout import rollout_events
from plimsoll_operator.desired.status import build_failed_status, is_due, with_emptied_lists
from plimsoll_operator.observed import Json, read_status
from plimsoll_operator.redaction import redact, redacted
from plimsoll_operator.tuning.values import Event
from plimsoll_operator.workers import Key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reported:
    """A status as it was applied, and what the server made of it: fields of other owners stay."""

    sent: Json
    answered: Json


def is_news(resource: Json, status: Json, now: float, last: Reported | None) -> bool:
    """Whether the status is to be written. Another owner's fields cannot be taken out: as long as nobody
    has touched the status since, it is what it was made to be, and writing it again would change
    nothing but its time, for ever."""
    previous, status = _status_of(resource), redacted(status)
    untouched = last is not None and last.answered == previous
    return is_due(last.sent if last is not None and untouched else previous, status, now)


def _status_of(resource: Json) -> Json:
    found = resource.get("status")
    return found if isinstance(found, dict) else {}


async def report(
    cluster: Cluster,
    resource: Json,
    status: Json,
    now: float,
    *,
    events: Iterable[Event] = (),
    last: Reported | None = None,
) -> Reported | None:
    """Status first: an Event tells of what can already be read there. ``last`` is the last write;
    what is returned goes into the next pass."""
    status = redacted(status)
    if is_news(resource, status, now, last):
        previous = _status_of(resource)
        answered = await apply_status(cluster, resource, with_emptied_lists(status, previous))
        last = Reported(status, answered)
        before = read_status(resource)
        turns = rollout_events(before.get("rollout", {}), status.get("rollout", {}))
        events = (*events, *turns, *build_events(before, status))
    for event in (replace(each, message=redact(each.message)) for each in events):
        # The same in the operator's log, for who has no cluster at hand: decisions, failures, changes.
        level = logging.WARNING if event.warning else logging.INFO
        metadata = resource["metadata"]
        where = (metadata["namespace"], metadata["name"])
        logger.log(level, "%s/%s: %s: %s", *where, event.reason, event.message)
        await record_event(cluster, resource, event, now)
    return last


async def report_failure(
    cluster: Cluster,
    key: Key,
    error: Exception,
    now: float,
    kind: Resource = api.LLM_DEPLOYMENT,
) -> None:
    """Shows the user that passes fail, and with what."""
    resource = await cluster.get(kind, *key)
    if resource is not None and "deletionTimestamp" not in resource["metadata"]:
        await report(cluster, resource, build_failed_status(resource, error, now), now)
