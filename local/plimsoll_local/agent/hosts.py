"""The /etc/hosts of a pod: itself, its aliases and, since there is no DNS server, all Services.

In: the pod, its address, the cluster's Services and pods as API JSON. Out: the file's text. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll_local.agent.api import Json

CLUSTER_DOMAIN = "cluster.local"
_LOOPBACK = """\
# Written by the node agent; changes are overwritten.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
"""
# With no resolver named, glibc asks 127.0.0.1: refused at once, where a real one would time out.
RESOLVER_CONFIGURATION = (
    "# There is no DNS server here: see /etc/hosts.\noptions timeout:1 attempts:1\n"
)


def host_name(pod: Json) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def hosts_file(pod: Json, pod_ip: str, services: Iterable[Json], pods: Iterable[Json]) -> str:
    """``pods`` with a hostname and a subdomain get the names a headless Service gives them."""
    namespace = pod["metadata"]["namespace"]
    own = [*_domain_names(pod), host_name(pod)]
    lines = [f"{pod_ip}\t{' '.join(own)}"]
    for alias in pod["spec"].get("hostAliases", ()):
        lines.append(f"{alias['ip']}\t{' '.join(alias.get('hostnames', ()))}")
    for service in services:
        address = service["spec"].get("clusterIP")
        if address not in (None, "", "None"):
            meta = service["metadata"]
            names = _forms(f"{meta['name']}.{meta['namespace']}.svc")
            if meta["namespace"] == namespace:
                names.append(meta["name"])
            lines.append(f"{address}\t{' '.join(names)}")
    for other in pods:
        address = other.get("status", {}).get("podIP")
        names = _domain_names(other)
        if address and names and other["metadata"]["uid"] != pod["metadata"]["uid"]:
            lines.append(f"{address}\t{' '.join(names)}")
    return _LOOPBACK + "".join(line + "\n" for line in sorted(lines))


def _domain_names(pod: Json) -> list[str]:
    subdomain = pod["spec"].get("subdomain")
    if not subdomain:
        return []
    return _forms(f"{host_name(pod)}.{subdomain}.{pod['metadata']['namespace']}.svc")


def _forms(name: str) -> list[str]:
    """``x.ns.svc`` with the cluster's domain, as it is, and without ``.svc``."""
    return [f"{name}.{CLUSTER_DOMAIN}", name, name.removesuffix(".svc")]
