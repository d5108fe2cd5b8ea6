"""The Kubernetes API as plain JSON: requests, watches and caches of watched objects.

In: a kubeconfig file, API paths, JSON bodies. Out: decoded JSON, or the client library's
ApiException. Configuration, TLS and credentials are the library's; its model classes are not used,
because the agent passes through objects it does not own field by field.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

Json = dict[str, Any]
Key = tuple[str, str]  # namespace, name

log = logging.getLogger(__name__)

STRATEGIC_MERGE = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
# How long one watch request may last; the server ends it and the next goes on from there.
_WATCH_SECONDS = 240
_RETRY_SECONDS = 1.0
CONNECTION_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class Api:
    """One connection pool to one API server."""

    def __init__(self, configuration: client.Configuration) -> None:
        # Every object kind keeps a watch open, so the pool has no bound of its own.
        configuration.connection_pool_maxsize = 0
        self._client = client.ApiClient(configuration)

    @classmethod
    async def connect(cls, kubeconfig: Path) -> Api:
        """Reads the kubeconfig; no request is made yet."""
        configuration = client.Configuration()
        load: Callable[..., Awaitable[None]] = config.load_kube_config
        await load(str(kubeconfig), client_configuration=configuration)
        return cls(configuration)

    async def close(self) -> None:
        close: Callable[[], Awaitable[None]] = self._client.close
        await close()

    async def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        seconds: float = 15.0,
    ) -> Json:
        """One call; raises ApiException for any answer outside 2xx."""
        response = await self._send(method, path, body, query, content_type, seconds)
        text = await response.read()
        if not 200 <= response.status <= 299:
            raise _as_exception(response.status, text)
        document: Json = json.loads(text)
        return document

    async def watch(
        self, path: str, query: Mapping[str, str], resource_version: str
    ) -> AsyncIterator[tuple[str, Json]]:
        """Event type and object of every change after ``resource_version``, until the server ends
        the watch. Raises ApiException, with 410 when that version is too old."""
        wishes = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        response = await self._send(
            "GET", path, None, wishes, "application/json", _WATCH_SECONDS + 30
        )
        if response.status != 200:
            raise _as_exception(response.status, await response.read())
        try:
            while line := await response.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _as_exception(event["object"].get("code", 500), line)
                yield event["type"], event["object"]
        finally:
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        query: Mapping[str, str] | None,
        content_type: str,
        seconds: float,
    ) -> aiohttp.ClientResponse:
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=seconds)
        response: aiohttp.ClientResponse = answer.response
        return response


def _as_exception(status: int, body: bytes) -> ApiException:
    error = ApiException(status=status, reason=body.decode(errors="replace")[:500])
    error.body = body.decode(errors="replace")
    return error


def object_key(obj: Json) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


class Informer:
    """A local copy of all objects of one kind (and field selector), kept up by list and watch.

    ``on_change(event type, object)`` is called in the event loop for every ADDED, MODIFIED and
    DELETED, also for what a new list shows to have changed while the watch was broken.
    """

    def __init__(
        self,
        api: Api,
        path: str,
        on_change: Callable[[str, Json], None],
        query: Mapping[str, str] | None = None,
    ) -> None:
        self.objects: dict[Key, Json] = {}
        self.synced = asyncio.Event()
        self._api = api
        self._path = path
        self._query = dict(query or {})
        self._on_change = on_change

    def get(self, namespace: str, name: str) -> Json | None:
        return self.objects.get((namespace, name))

    async def run(self) -> None:
        """Lists and watches until cancelled; connection errors are retried for ever."""
        while True:
            try:
                version = await self._list()
                self.synced.set()
                while True:
                    version = await self._follow(version)
            except ApiException as error:
                if error.status != 410:
                    log.warning("watching %s: %s %s", self._path, error.status, error.reason)
                    await asyncio.sleep(_RETRY_SECONDS)
            except CONNECTION_ERRORS as error:
                log.warning("watching %s: %s", self._path, error or type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _list(self) -> str:
        answer = await self._api.request("GET", self._path, query=self._query)
        present = {object_key(item): item for item in answer["items"]}
        for key in self.objects.keys() - present.keys():
            self._apply("DELETED", self.objects[key])
        for key, item in present.items():
            known = self.objects.get(key)
            if known is not None and known["metadata"]["uid"] != item["metadata"]["uid"]:
                self._apply("DELETED", known)
                known = None
            if known is None:
                self._apply("ADDED", item)
            elif _version(known) != _version(item):
                self._apply("MODIFIED", item)
        return str(answer["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> str:
        async for kind, item in self._api.watch(self._path, self._query, version):
            version = _version(item)
            if kind != "BOOKMARK":
                self._apply(kind, item)
        return version

    def _apply(self, kind: str, item: Json) -> None:
        if kind == "DELETED":
            self.objects.pop(object_key(item), None)
        else:
            self.objects[object_key(item)] = item
        self._on_change(kind, item)


def _version(obj: Json) -> str:
    return str(obj["metadata"]["resourceVersion"])
