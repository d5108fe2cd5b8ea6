"""What kopf calls: watch events become triggers, nothing more.

In: events of LLMDeployments and of MemoryAdvisors; what they own is watched elsewhere (watch_cache.py). Out:
triggers of the workers. Only raw event handlers are used: kopf's other handlers leave finalizers and annotations on the objects, and an
idle object must not be written (docs/architecture.md).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import kopf

from plimsoll_operator import names
from plimsoll_operator.controller import Controller
from plimsoll_operator.workers import Key


@kopf.on.login()
def login(**details: Any) -> kopf.ConnectionInfo | None:
    """The same credentials and the same server as the operator's own client has (cluster.Cluster.connect):
    kopf would ask for the server's name in the cluster's DNS."""
    found = kopf.login_with_service_account(**details)
    if found is None:
        return kopf.login_with_kubeconfig(**details)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


@kopf.on.startup()
async def start(memo: Controller, settings: kopf.OperatorSettings, **_: Any) -> None:
    # The default peering object is shared with every other kopf program in the cluster; one of
    # them with a higher priority would silence this operator.
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    # Definitions and namespaces that come and go are for who may read the whole cluster.
    settings.scanning.disabled = not memo.options.clusterwide
    await memo.start()


@kopf.on.cleanup()
async def stop(memo: Controller, **_: Any) -> None:
    await memo.stop()


@kopf.on.event(names.GROUP, names.VERSION, names.PLURAL)
async def deployment_changed(
    memo: Controller, namespace: str | None, name: str | None, **_: Any
) -> None:
    memo.trigger(Key(namespace or "", name or ""))


@kopf.on.event(names.GROUP, names.VERSION, names.ADVISOR_PLURAL)
async def advisor_changed(
    memo: Controller, namespace: str | None, name: str | None, **_: Any
) -> None:
    memo.trigger_advisor(Key(namespace or "", name or ""))
