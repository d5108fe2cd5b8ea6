"""The LeaderWorkerSet that runs replicas of several pods each, in the place of a StatefulSet.

In: the spec, the plan's step, and the template of a group. Out: the object. A group is made anew as a
whole when one of its pods is lost: ranks that have lost one cannot go on, and the restart of one
container would meet the others in the middle of something. What the plan says of ordinals holds of
groups; LeaderWorkerSet knows no OnDelete, so where the plan wants it, every group is rolled.
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import fingerprint, owned
from plimsoll_operator.desired.pod import build_pod_template, build_worker_template
from plimsoll_operator.plan import Step
from plimsoll_operator.spec import Deployment

Json = dict[str, Any]


def build_group_template(deployment: Deployment, default_image: str) -> Json:
    """One replica: a function of the spec alone, as a pod's template is."""
    leader = build_pod_template(deployment, default_image)
    worker = build_worker_template(deployment, default_image)
    return {
        "size": deployment.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _with_metadata(leader, "labels", names.ROLE_LABEL, names.LEADER_ROLE),
        "workerTemplate": _with_metadata(worker, "labels", names.ROLE_LABEL, names.WORKER_ROLE),
    }


def build_leader_worker_set(deployment: Deployment, step: Step, template: Json) -> Json:
    """``template`` gets its hash into the pods: by it they are known to be of that template."""
    revision = fingerprint(template)
    stamped = {
        part: _with_metadata(body, "annotations", names.TEMPLATE_ANNOTATION, revision)
        if part.endswith("Template")
        else body
        for part, body in template.items()
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {
            **owned(deployment, names.group(deployment.name)),
            "annotations": {names.TEMPLATE_ANNOTATION: revision},
        },
        "spec": {
            "replicas": step.replicas,
            # Workers wait for their leader, and it for them.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": stamped,
            "networkConfig": {"subdomainPolicy": "Shared"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "partition": 0 if step.on_delete else step.partition,
                    "maxUnavailable": 1,
                    # A surge is a group more in replicas, as with a StatefulSet.
                    "maxSurge": 0,
                },
            },
        },
    }


def _with_metadata(template: Json, part: str, key: str, text: str) -> Json:
    metadata = template["metadata"]
    return {**template, "metadata": {**metadata, part: {**metadata.get(part, {}), key: text}}}
