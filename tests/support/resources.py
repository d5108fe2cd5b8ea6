"""Kubernetes objects as the API server returns them, small and with sensible defaults."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from plimsoll_operator.observed import Observed, Pod, StatefulSet
from plimsoll_operator.pods import read_pod
from plimsoll_operator.spec import Deployment

Json = dict[str, Any]

# A whole second, as the API server's times are.
NOW = 1_800_000_000.0


def time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def llmdeployment(name: str = "assistant", generation: int = 1, **spec: Any) -> Json:
    """An LLMDeployment on CPU with a tiny model; ``spec`` fields replace the defaults."""
    wanted: Json = {
        "model": {"uri": "hf://org/tiny"},
        "replicas": 1,
        "accelerator": {"resourceName": ""},
        **copy.deepcopy(spec),
    }
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "generation": generation,
            "resourceVersion": "1",
            "creationTimestamp": time(NOW - 3600),
            "managedFields": [
                {"manager": "kubectl", "operation": "Update", "time": time(NOW - 3600)},
                {
                    "manager": "plimsoll-operator",
                    "subresource": "status",
                    "operation": "Apply",
                    "time": time(NOW),
                },
            ],
        },
        "spec": wanted,
    }


def deployment(**spec: Any) -> Deployment:
    return Deployment.parse(llmdeployment(**spec))


def pod_body(
    name: str = "assistant-0",
    *,
    revision: str = "new",
    ready: bool = True,
    waiting: Json | None = None,
    terminated: Json | None = None,
    last_terminated: Json | None = None,
    restarts: int = 0,
    unschedulable: str | None = None,
    created: float = NOW - 600,
    ready_since: float = NOW - 500,
    deleting: bool = False,
    image: str = "plimsoll/engine:0.1.0",
) -> Json:
    """A pod of a StatefulSet with its engine container running, waiting or ended."""
    metadata: Json = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}-{revision}",
        "labels": {"controller-revision-hash": revision, "plimsoll.dev/deployment": "assistant"},
        "creationTimestamp": time(created),
    }
    if deleting:
        metadata["deletionTimestamp"] = time(NOW)
    conditions = [
        {
            "type": "Ready",
            "status": "True" if ready else "False",
            "lastTransitionTime": time(ready_since),
        }
    ]
    if unschedulable is not None:
        conditions.append(
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": unschedulable,
                "lastTransitionTime": time(created),
            }
        )
        return {
            "metadata": metadata,
            "spec": {},
            "status": {"phase": "Pending", "conditions": conditions},
        }
    if waiting is not None:
        state: Json = {"waiting": waiting}
    elif terminated is not None:
        state = {"terminated": terminated}
    else:
        state = {"running": {"startedAt": time(created)}}
    container: Json = {
        "name": "engine",
        "image": image,
        "ready": ready,
        "started": "running" in state,
        "restartCount": restarts,
        "state": state,
    }
    if last_terminated is not None:
        container["lastState"] = {"terminated": last_terminated}
    return {
        "metadata": metadata,
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "podIP": "10.244.0.7",
            "conditions": conditions,
            "containerStatuses": [container],
        },
    }


def pod(name: str = "assistant-0", **state: Any) -> Pod:
    return read_pod(pod_body(name, **state))


def statefulset(
    *,
    replicas: int = 1,
    partition: int = 0,
    current: str = "new",
    update: str = "new",
    generation: int = 1,
    observed_generation: int | None = None,
    applied_at: float | None = None,
) -> StatefulSet:
    return StatefulSet(
        replicas=replicas,
        partition=partition,
        generation=generation,
        observed_generation=generation if observed_generation is None else observed_generation,
        current_revision=current,
        update_revision=update,
        applied_at=applied_at,
    )


def observed(
    resource: Json | None = None,
    *,
    pods: tuple[Pod, ...] = (),
    statefulset: StatefulSet | None = None,
    status: Json | None = None,
    changed_at: float = NOW - 3600,
) -> Observed:
    resource = copy.deepcopy(resource or llmdeployment())
    if status is not None:
        resource["status"] = status
    return Observed(
        deployment=Deployment.parse(resource),
        resource=resource,
        changed_at=changed_at,
        children={},
        statefulset=statefulset,
        pods=pods,
        credentials=None,
    )
