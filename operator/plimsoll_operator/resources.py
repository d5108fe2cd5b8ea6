"""The kinds that the operator reads and writes, and where the API server has them.

Out: paths of requests. Knows no connection: both clients, the operator's and the command line's,
take their paths from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_operator import names


@dataclass(frozen=True)
class Resource:
    api_version: str
    kind: str
    plural: str

    @property
    def path_of_all(self) -> str:
        """Of every namespace, and of what is in none."""
        root = "/api/" if "/" not in self.api_version else "/apis/"
        return f"{root}{self.api_version}/{self.plural}"

    def path(self, namespace: str, name: str | None = None, subresource: str | None = None) -> str:
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [f"{root}{self.api_version}", "namespaces", namespace, self.plural]
        return "/".join([*parts, *(part for part in (name, subresource) if part is not None)])


POD = Resource("v1", "Pod", "pods")
NODE = Resource("v1", "Node", "nodes")
SERVICE = Resource("v1", "Service", "services")
SECRET = Resource("v1", "Secret", "secrets")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
EVENT = Resource("v1", "Event", "events")
STATEFUL_SET = Resource("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Resource("apps/v1", "Deployment", "deployments")
LEADER_WORKER_SET = Resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
INFERENCE_POOL = Resource("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
JOB = Resource("batch/v1", "Job", "jobs")
DISRUPTION_BUDGET = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")
LLM_DEPLOYMENT = Resource(names.API_VERSION, names.KIND, names.PLURAL)
MEMORY_PROFILE = Resource(names.API_VERSION, names.PROFILE_KIND, names.PROFILE_PLURAL)
MEMORY_ADVISOR = Resource(names.API_VERSION, names.ADVISOR_KIND, names.ADVISOR_PLURAL)
# Whose status tells of a worker's passes.
REPORTED = {each.kind: each for each in (LLM_DEPLOYMENT, MEMORY_ADVISOR)}
