"""The Secrets, ConfigMaps and Services of the cluster, kept up by watches.

In: an API connection. Out: lookups, and calls when something that may be mounted has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from kubernetes.aio.client.exceptions import ApiException

from plimsoll_local.agent.api import Api, Informer, Json
from plimsoll_local.agent.content import referenced_objects

_PLURALS = {"secret": "secrets", "configMap": "configmaps"}


class ClusterObjects:
    """Implements :class:`~plimsoll_local.agent.environment.Objects`.

    ``on_content(kind, object)`` is called when a Secret or ConfigMap (kind "secret", "configMap")
    has changed, ``on_services()`` when a Service has.
    """

    def __init__(
        self,
        api: Api,
        on_content: Callable[[str, Json], None],
        on_services: Callable[[], None],
    ) -> None:
        self._api = api
        self._content = {
            kind: Informer(api, f"/api/v1/{plural}", self._notify(kind, on_content))
            for kind, plural in _PLURALS.items()
        }
        self._services = Informer(api, "/api/v1/services", lambda *_: on_services())

    @staticmethod
    def _notify(kind: str, on_content: Callable[[str, Json], None]) -> Callable[[str, Json], None]:
        return lambda _, obj: on_content(kind, obj)

    @property
    def informers(self) -> tuple[Informer, ...]:
        return (*self._content.values(), self._services)

    def secret(self, namespace: str, name: str) -> Json | None:
        return self._content["secret"].get(namespace, name)

    def config_map(self, namespace: str, name: str) -> Json | None:
        return self._content["configMap"].get(namespace, name)

    def services(self) -> Iterable[Json]:
        return self._services.objects.values()

    async def fetch_missing(self, pod: Json) -> None:
        """Asks the API server for what the pod names and no watch has shown yet: an object made
        just before its pod may arrive just after it."""
        namespace = pod["metadata"]["namespace"]
        for kind, name in referenced_objects(pod):
            informer = self._content[kind]
            if informer.get(namespace, name) is None:
                path = f"/api/v1/namespaces/{namespace}/{_PLURALS[kind]}/{name}"
                with contextlib.suppress(ApiException):
                    informer.objects[(namespace, name)] = await self._api.request("GET", path)
