"""The API server, as few verbs over plain dictionaries.

In: kinds, names and bodies. Out: bodies as the server returned them. The `kubernetes` package
brings credentials, TLS and transport; bodies stay dictionaries, because the pure builders make
dictionaries and what is compared must be what was stored. Knows nothing of LLMDeployments.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from plimsoll_operator import names
from plimsoll_operator.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    INFERENCE_POOL,
    JOB,
    LEADER_WORKER_SET,
    LEASE,
    LLM_DEPLOYMENT,
    MEMORY_ADVISOR,
    MEMORY_PROFILE,
    NETWORK_POLICY,
    NODE,
    POD,
    REPORTED,
    SECRET,
    SERVICE,
    STATEFUL_SET,
    Resource,
)
from plimsoll_operator.telemetry import Telemetry

__all__ = [
    "CONFIG_MAP",
    "DEPLOYMENT",
    "DISRUPTION_BUDGET",
    "EVENT",
    "INFERENCE_POOL",
    "JOB",
    "LEADER_WORKER_SET",
    "LEASE",
    "LLM_DEPLOYMENT",
    "MEMORY_ADVISOR",
    "MEMORY_PROFILE",
    "NETWORK_POLICY",
    "NODE",
    "POD",
    "REPORTED",
    "SECRET",
    "SERVICE",
    "STATEFUL_SET",
    "ApiError",
    "Cluster",
    "Resource",
]

Json = dict[str, Any]

REQUESTS_AT_ONCE = 32

_BY_KIND = {
    resource.kind: resource
    for resource in (
        SERVICE,
        SECRET,
        CONFIG_MAP,
        STATEFUL_SET,
        LEADER_WORKER_SET,
        INFERENCE_POOL,
        JOB,
        DISRUPTION_BUDGET,
        NETWORK_POLICY,
        MEMORY_PROFILE,
    )
}


class ApiError(Exception):
    """The server's own words and HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """True when the same request will be refused again: invalid or forbidden by policy."""
        # A field of the wrong type or name is the client's fault, but the server answers a
        # server-side apply of it with 500.
        mistyped = self.status == 500 and "failed to create typed patch object" in str(self)
        return mistyped or self.status in (400, 403, 422)


class Cluster:
    """One connection to the API server. ``close`` when done."""

    def __init__(self, api: client.ApiClient, telemetry: Telemetry | None = None) -> None:
        self._api = api
        self._telemetry = telemetry
        # The rest waits its turn here, where its own time does not run yet.
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

    @classmethod
    async def connect(cls, telemetry: Telemetry | None = None, *, watches: int = 0) -> Self:
        """By the pod's service account, or else by KUBECONFIG (~/.kube/config). ``watches`` hold a
        connection each, beside those for requests."""
        configuration = client.Configuration()
        configuration.connection_pool_maxsize += watches
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG"), client_configuration=configuration
            )
        return cls(client.ApiClient(configuration), telemetry)

    async def close(self) -> None:
        await self._api.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """None when there is no such object."""
        try:
            return await self._request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def serves(self, resource: Resource) -> bool:
        """Whether there is such a kind; everybody may ask."""
        try:
            listed = await self._request("GET", f"/apis/{resource.api_version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(each["name"] == resource.plural for each in listed["resources"])

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]:
        items: list[Json] = (await self.list_all(resource, namespace, label_selector))["items"]
        return items

    async def list_all(
        self, resource: Resource, namespace: str | None, label_selector: str = ""
    ) -> Json:
        """With the version that a watch goes on from; ``namespace`` None: of all."""
        path = resource.path_of_all if namespace is None else resource.path(namespace)
        return await self._request("GET", path, query=[("labelSelector", label_selector)])

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        label_selector: str,
        version: str,
        silent_seconds: float,
    ) -> AsyncIterator[Json]:
        """Events after ``version``, until the server ends the watch. Raises TimeoutError after
        ``silent_seconds`` without a word, ApiError 410 when the version has expired."""
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("labelSelector", label_selector),
            ("resourceVersion", version),
        ]
        path = resource.path_of_all if namespace is None else resource.path(namespace)
        request = await self._serialized("GET", path, query, {"Accept": "application/json"}, None)
        response = await self._api.call_api(
            *request, _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        )
        stream, rest = response.response, b""
        if self._telemetry is not None:
            self._telemetry.count_request("WATCH", response.status)
        try:
            if not 200 <= response.status <= 299:
                raise ApiError(response.status, _words(await response.read()) or response.reason)
            while True:
                async with asyncio.timeout(silent_seconds):
                    if not (piece := await stream.content.readany()):
                        return
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            stream.close()

    async def find_everywhere(self, resource: Resource, field_selector: str = "") -> list[Json]:
        """In every namespace. Raises ApiError 403 where the operator may not."""
        query = [("fieldSelector", field_selector)] if field_selector else []
        items: list[Json] = (await self._request("GET", resource.path_of_all, query=query))["items"]
        return items

    async def apply(self, body: Json) -> Json:
        """Server-side apply; takes back fields that somebody else has set meanwhile."""
        metadata = body["metadata"]
        return await self._request(
            "PATCH",
            _BY_KIND[body["kind"]].path(metadata["namespace"], metadata["name"]),
            query=[("fieldManager", names.FIELD_MANAGER), ("force", "true")],
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def patch_child(self, live: Json, patch: Json) -> Json:
        """Merges ``patch`` into the object that ``live`` was read from."""
        metadata = live["metadata"]
        return await self._request(
            "PATCH",
            _BY_KIND[live["kind"]].path(metadata["namespace"], metadata["name"]),
            query=[("fieldManager", names.FIELD_MANAGER)],
            body=patch,
            content_type="application/merge-patch+json",
        )

    async def apply_status(self, resource: Resource, body: Json) -> Json:
        """Server-side apply of the status: fields that are left out are removed. Never creates."""
        metadata = body["metadata"]
        return await self._request(
            "PATCH",
            resource.path(metadata["namespace"], metadata["name"], "status"),
            query=[("fieldManager", names.FIELD_MANAGER), ("force", "true")],
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        query = [("fieldManager", names.FIELD_MANAGER)]
        return await self._request("POST", resource.path(namespace), query=query, body=body)

    async def replace(self, resource: Resource, body: Json) -> Json:
        """Raises ApiError 409 when the object is not the one that ``body`` was read from any more."""
        path = resource.path(body["metadata"]["namespace"], body["metadata"]["name"])
        query = [("fieldManager", names.FIELD_MANAGER)]
        return await self._request("PUT", path, query=query, body=body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly this object, not a later one of the same name; absent is fine."""
        # A Job deleted without it would leave its pods.
        body: Json = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("DELETE", resource.path(namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def delete_child(self, body: Json) -> None:
        """Deletes the object that ``body`` was read from."""
        metadata = body["metadata"]
        resource = _BY_KIND[body["kind"]]
        await self.delete(resource, metadata["namespace"], metadata["name"], metadata["uid"])

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        status = 0
        try:
            request = await self._serialized(method, path, query or [], headers, body)
            async with self._turns:
                response = await self._api.call_api(*request, _request_timeout=30)
                status = response.status
                content = await response.read()
        except ApiException as error:
            status = error.status or 0
            raise ApiError(status, str(error.reason)) from error
        finally:
            if self._telemetry is not None:
                self._telemetry.count_request(method, status)
        if not 200 <= response.status <= 299:
            raise ApiError(response.status, _words(content) or response.reason)
        document: Json = json.loads(content) if content else {}
        return document

    async def _serialized(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        headers: dict[str, str],
        body: Json | None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        request: tuple[Any, Any, Any, Any, Any] = await self._api.param_serialize(
            method,
            path,
            query_params=query,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        return request


def _words(content: bytes) -> str:
    """What the server says; a proxy in between may answer in something else than JSON."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:256]
