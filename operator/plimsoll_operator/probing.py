"""Asks the canary of a rollout, and counts what failed.

In: the cluster (for the API key), the engines, what the canary waits for and its last answer. Out: its
newest answer. Knows neither HTTP nor what follows from an answer.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll_operator import cluster as api
from plimsoll_operator.cluster import Cluster
from plimsoll_operator.engines import Engines
from plimsoll_operator.observe import read_key
from plimsoll_operator.plan.canary import Canary, Probe, ProbeOutcome
from plimsoll_operator.spec import Deployment


async def ask(
    cluster: Cluster,
    engines: Engines,
    deployment: Deployment,
    canary: Canary,
    last: Probe | None,
) -> Probe | None:
    """The canary's newest answer, or the one before while it is asked."""
    assert canary.probe_tokens is not None
    api_key = None
    if deployment.api_key is not None:
        reference = deployment.api_key
        secret = await cluster.get(api.SECRET, deployment.namespace, reference.name)
        api_key = None if secret is None else read_key(secret, reference.key)
    probe = engines.probe(deployment, canary.pod, tokens=canary.probe_tokens, api_key=api_key)
    if probe is None:
        return last
    same = last is not None and last.pod_uid == probe.pod_uid
    before = last.failures if last is not None and same else 0
    return replace(probe, failures=before + (probe.outcome is ProbeOutcome.FAILED))
