"""What a pod asks for and this node agent does not do.

In: a pod as API JSON. Out: one sentence for each such wish that changes what the pod may expect.
That every container runs as the user who started the cluster, and that CPU limits are not enforced,
is documented and not repeated for every pod. Pure.
"""

from __future__ import annotations

from plimsoll_local.agent.api import Json


def ignored_fields(pod: Json) -> tuple[str, ...]:
    spec = pod["spec"]
    found = [
        f"spec.{field} is not supported by this node agent and is ignored"
        for field in ("hostPID", "hostIPC", "shareProcessNamespace", "dnsConfig")
        if spec.get(field)
    ]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        name = container["name"]
        if any(port.get("hostPort") for port in container.get("ports", ())):
            found.append(f"hostPort of container {name} is not supported and is ignored")
        found.extend(
            f"{field} of container {name} is of type grpc, which is not supported: it will fail"
            for field in ("startupProbe", "livenessProbe", "readinessProbe")
            if "grpc" in container.get(field, {})
        )
        if container.get("volumeDevices"):
            found.append(f"volumeDevices of container {name} are not supported and are ignored")
    return tuple(found)
