"""The Job that fills the cache claim with the model before any pod is made with it.

In: a spec and this project's image. Out: a Job, or None where none is asked for. A Job's pods cannot be
changed, so its hash says whether a live one is still the wanted one (prefetch.py).
"""

from __future__ import annotations

from typing import Any

from plimsoll_operator import names
from plimsoll_operator.desired.metadata import fingerprint, owned
from plimsoll_operator.desired.pod import cache_volume, pod_security_context, restricted
from plimsoll_operator.runtimes.program import SCRATCH_DIR, TMP_DIR, from_secret, value, with_users
from plimsoll_operator.spec import Deployment, RuntimeName

Json = dict[str, Any]

COMMAND = ("python", "-m", "plimsoll_engine.prefetch")
# A hub that cannot be reached is tried by the process itself for minutes already.
BACKOFF_LIMIT = 3
_RESOURCES: Json = {
    "limits": {"memory": "2Gi"},
    "requests": {"cpu": "100m", "memory": "256Mi"},
}
# What concerns a pod with an accelerator or its place beside others is not for this one.
_PLACEMENT = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets")


def build_prefetch_job(deployment: Deployment, default_image: str) -> Json | None:
    """Its pods bear other labels than engines: no Service sends them requests. It is run by this
    project's image, which has the hub's client, for every runtime."""
    model = deployment.model
    if not model.cache.prefetch:
        return None
    arguments = [f"--model={model.location}"]
    if model.revision is not None:
        arguments.append(f"--revision={model.revision}")
    own_image = deployment.image if deployment.runtime is RuntimeName.PLIMSOLL else None
    container: Json = {
        "name": names.PREFETCH_CONTAINER,
        "image": own_image or default_image,
        "command": list(COMMAND),
        "args": arguments,
        "env": list(_environment(deployment)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _RESOURCES,
        "securityContext": restricted(),
        "volumeMounts": [
            {"name": "models", "mountPath": names.HF_HOME},
            {"name": "scratch", "mountPath": SCRATCH_DIR},
            {"name": "tmp", "mountPath": TMP_DIR},
        ],
    }
    if deployment.image_pull_policy is not None:
        container["imagePullPolicy"] = deployment.image_pull_policy
    fields = deployment.pod_template.fields
    template = {
        "metadata": {"labels": names.prefetch_labels(deployment.name)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security_context(deployment),
            "containers": [container],
            "volumes": [
                {"name": "models", **cache_volume(model.cache)},
                {"name": "scratch", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
            ],
            **{field: fields[field] for field in _PLACEMENT if field in fields},
        },
    }
    annotations = {names.TEMPLATE_ANNOTATION: fingerprint(template)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **owned(deployment, names.prefetch_job(deployment.name)),
            "annotations": annotations,
        },
        "spec": {"backoffLimit": BACKOFF_LIMIT, "template": template},
    }


def _environment(deployment: Deployment) -> tuple[Json, ...]:
    """The user's own too: HF_ENDPOINT or a proxy is for whoever asks the hub."""
    variables = [
        value("HF_HOME", names.HF_HOME),
        value("HOME", SCRATCH_DIR),
        value("TMPDIR", TMP_DIR),
    ]
    if deployment.model.token is not None:
        variables.append(from_secret("HF_TOKEN", deployment.model.token))
    return with_users(variables, deployment.pod_template.env)
