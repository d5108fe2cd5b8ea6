"""Every name, label, key and port that two places must agree on.

In: the name of an LLMDeployment. Out: strings. Knows no cluster and no spec.
"""

from __future__ import annotations

import hashlib
import re

GROUP = "plimsoll.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
PROFILE_KIND = "MemoryProfile"
PROFILE_PLURAL = "memoryprofiles"
ADVISOR_KIND = "MemoryAdvisor"
ADVISOR_PLURAL = "memoryadvisors"

FIELD_MANAGER = "plimsoll-operator"
COMPONENT = "plimsoll-operator"

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
# On the children: a hash of what was applied last, so that a removed field is noticed too.
APPLIED_ANNOTATION = f"{GROUP}/applied-hash"
# On the StatefulSet: a hash of the pod template alone. On a LeaderWorkerSet of both, and on its pods.
TEMPLATE_ANNOTATION = f"{GROUP}/template-hash"
# On the StatefulSet: nodes that its template avoids, and revisions that differ from it in those alone.
AVOIDED_NODES = f"{GROUP}/avoided-nodes"
ALIKE_REVISIONS = f"{GROUP}/alike-revisions"
# On an LLMDeployment, by a user: nodes that are never avoided, or *.
TRUSTED_NODES = f"{GROUP}/trusted-nodes"

# On the pods of a group: the leader serves, workers hold ranks.
ROLE_LABEL = f"{GROUP}/role"
LEADER_ROLE = "leader"
WORKER_ROLE = "worker"
# LeaderWorkerSet's own, on the pods that it makes.
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"

ENGINE_CONTAINER = "engine"
PREFETCH_CONTAINER = "prefetch"
GATE_CONTAINER = "gate"
HTTP_PORT = 8000
CONTROL_PORT = 8001
# Where the leader of a group of pods is joined by the others; ranks find each other on the next one.
GROUP_PORT = 8002
# Where vLLM is behind the gate, on the pod's loopback address.
UPSTREAM_PORT = 8002
SERVICE_PORT = 80

CONTROL_DIR = "/etc/plimsoll/control"
GROUP_TOKEN_KEY = "group-token"
PREVIOUS_CERTIFICATE = "previous.crt"
PREVIOUS_TOKEN = "previous-token"
LIMITS_DIR = "/etc/plimsoll/limits"
LIMITS_KEY = "limits.json"
HF_HOME = "/models"
MODEL_DIR = "/model"
# What engines compile, where the cache keeps it: a folder of the claim, mounted by itself.
COMPILED_DIR = "/compiled"
COMPILED_FOLDER = "plimsoll-compiled"


def selector(deployment: str) -> dict[str, str]:
    """Labels that pick exactly this deployment's engine pods; immutable in the StatefulSet."""
    return {
        "app.kubernetes.io/name": "plimsoll-engine",
        "app.kubernetes.io/instance": deployment,
    }


# Labels of the operator's own pods (the chart sets them).
OPERATOR_SELECTOR = {"app.kubernetes.io/name": "plimsoll-operator"}


def labels(deployment: str) -> dict[str, str]:
    """Labels of every child object."""
    return {
        **selector(deployment),
        "app.kubernetes.io/managed-by": "plimsoll",
        DEPLOYMENT_LABEL: deployment,
    }


def label_selector(wanted: dict[str, str]) -> str:
    """The string form that the scale subresource and list requests use."""
    return ",".join(f"{key}={value}" for key, value in sorted(wanted.items()))


def headless_service(deployment: str) -> str:
    return f"{deployment}-pods"


def group(deployment: str) -> str:
    """The LeaderWorkerSet: its controller makes a Service of this name, so it is not the API's."""
    return f"{deployment}-group"


def group_revision(deployment: str, template_hash: str) -> str:
    """What a StatefulSet calls a controller revision; nobody numbers those of a LeaderWorkerSet."""
    return f"{group(deployment)}-{template_hash}"


def prefetch_job(deployment: str) -> str:
    return f"{deployment}-prefetch"


def prefetch_labels(deployment: str) -> dict[str, str]:
    """Labels of the pods that fetch a model: none of them is an engine."""
    return {
        "app.kubernetes.io/name": "plimsoll-prefetch",
        "app.kubernetes.io/instance": deployment,
        "app.kubernetes.io/managed-by": "plimsoll",
        DEPLOYMENT_LABEL: deployment,
    }


def control_secret(deployment: str) -> str:
    return f"{deployment}-control"


def limits_config_map(deployment: str) -> str:
    return f"{deployment}-limits"


def url(deployment: str, namespace: str) -> str:
    """Where clients inside the cluster reach the API."""
    return f"http://{deployment}.{namespace}.svc/v1"


def memory_profile(key: str) -> str:
    """``slug-sha256[:10]`` of a profile's full key: readable, and no two keys share a name."""
    slug = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:40].strip("-")
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    return f"{slug or 'profile'}-{digest}"
