"""What kopf calls: watch events become triggers, nothing more.

In: events of LLMDeployments and of MemoryAdvisors; what they own is watched elsewhere (watch_cache.py). Out:
triggers of the workers. Only raw event handlers are used: kopf's other handlers leave finalizers and annotations on the objects, and an
idle object must not be written (docs/architecture.md).
"""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll_operator import names
from plimsoll_operator.controller import Controller
from plimsoll_operator.workers import Key


@kopf.on.login()
def login(**details: Any) -> kopf.ConnectionInfo | None:
    """The same credentials as the operator's own client (cluster.Cluster.connect)."""
    return kopf.login_with_service_account(**details) or kopf.login_with_kubeconfig(**details)


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
