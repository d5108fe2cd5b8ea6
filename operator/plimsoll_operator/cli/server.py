"""The API server as the command line uses it: a few verbs, and errors that say what to do.

In: kubeconfig, context and namespace as kubectl takes them. Out: plain dictionaries, or a
CommandError. Everything here blocks; nothing is retried.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Self

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from plimsoll_operator.cli.errors import CommandError, UsageError
from plimsoll_operator.resources import LLM_DEPLOYMENT, MEMORY_ADVISOR, Resource

Json = dict[str, Any]

FIELD_MANAGER = "kubectl-plimsoll"
_SECONDS = 15


@dataclass(frozen=True)
class Target:
    """What the command line says of where to look. ``namespace`` None: the context's own."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    all_namespaces: bool = False


class Server:
    """``namespace`` is the one asked for; None means all of them."""

    def __init__(self, api: client.ApiClient, namespace: str | None) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    def connect(cls, target: Target) -> Self:
        """Reads the kubeconfig; the first request is what reaches the server."""
        configuration = client.Configuration()
        try:
            config.load_kube_config(
                target.kubeconfig, target.context, client_configuration=configuration
            )
            own = _namespace_of(target)
        except ConfigException as error:
            if target.kubeconfig or target.context or "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise UsageError(_no_config(target, error)) from error
            config.load_incluster_config(client_configuration=configuration)
            own = "default"
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(_no_config(target, error)) from error
        configuration.retries = False
        namespace = None if target.all_namespaces else target.namespace or own
        return cls(client.ApiClient(configuration), namespace)

    @property
    def url(self) -> str:
        return str(self._api.configuration.host)

    def deployments(self) -> list[Json]:
        """Every LLMDeployment of the namespace, or of all."""
        return self.find(LLM_DEPLOYMENT)

    def deployment(self, name: str) -> Json:
        """Raises CommandError that names those which exist."""
        return self._named(LLM_DEPLOYMENT, name)

    def advisors(self) -> list[Json]:
        """Every MemoryAdvisor of the namespace, or of all."""
        return self.find(MEMORY_ADVISOR)

    def advisor(self, name: str) -> Json:
        """Raises CommandError that names those which exist."""
        return self._named(MEMORY_ADVISOR, name)

    def _named(self, resource: Resource, name: str) -> Json:
        try:
            return self.get(self.path(resource, name))
        except NotFound:
            found = [each["metadata"]["name"] for each in self.find(resource)]
            there = f"there are {', '.join(sorted(found))}" if found else "there is none"
            raise CommandError(
                f"namespace {self.namespace} has no {resource.kind} {name}: {there}"
            ) from None

    def path(self, resource: Resource, name: str) -> str:
        """Of one object in the namespace asked for."""
        assert self.namespace is not None, "no command of one object takes all namespaces"
        return resource.path(self.namespace, name)

    def find(self, resource: Resource, selector: str | None = None) -> list[Json]:
        query = [] if selector is None else [("labelSelector", selector)]
        try:
            items: list[Json] = self.get(collection(resource, self.namespace), query)["items"]
        except NotFound:
            raise CommandError(
                f"the cluster has no {resource.plural}.{resource.api_version.partition('/')[0]}: "
                "the definitions are not installed (helm install plimsoll charts/plimsoll -n "
                "plimsoll-system --create-namespace); see kubectl plimsoll doctor"
            ) from None
        return items

    def get(self, path: str, query: list[tuple[str, str]] | None = None) -> Json:
        return self._request("GET", path, query or [])

    def create(self, path: str, body: Json) -> Json:
        return self._request("POST", path, [], body)

    def patch(self, path: str, body: Json) -> Json:
        """A merge patch under this command's field manager."""
        query = [("fieldManager", FIELD_MANAGER)]
        return self._request("PATCH", path, query, body, "application/merge-patch+json")

    def _request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            request = self._api.param_serialize(
                method,
                path,
                query_params=query,
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = self._api.call_api(*request, _request_timeout=_SECONDS)
            content = response.read()
        except (ApiException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise CommandError(f"the API server {self.url} cannot be reached: {error}") from error
        if 200 <= response.status <= 299:
            document: Json = json.loads(content)
            return document
        raise refusal(method, path, response.status, content)


class NotFound(CommandError):
    """No such object, or no such kind."""


class Forbidden(CommandError):
    """The server knows the user, and refuses."""


class Conflict(CommandError):
    """The object has changed since it was read."""


def collection(resource: Resource, namespace: str | None) -> str:
    """The path of all objects of a kind, of one namespace or of every one."""
    if namespace is not None:
        return resource.path(namespace)
    return resource.path("-").replace("/namespaces/-/", "/")


def refusal(method: str, path: str, status: int, content: bytes) -> CommandError:
    """The server's answer as an error that says what was asked."""
    try:
        words = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        words = content.decode(errors="replace")[:256]
    if status == 404:
        return NotFound(words)
    if status == 403:
        return Forbidden(f"you may not {verb(method, path)}: {words}")
    if status == 401:
        return CommandError("the API server does not accept the kubeconfig's credentials (401)")
    if status == 409:
        return Conflict(f"somebody changed it at the same moment: {words}; try again")
    return CommandError(f"the API server answered {status}: {words}")


def verb(method: str, path: str) -> str:
    """``patch llmdeployments in namespace default``, from a request."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    where = ""
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        where, parts = f" in namespace {parts[1]}", parts[2:]
    named = len(parts) > 1
    words = {"GET": "get" if named else "list", "POST": "create", "PATCH": "patch"}
    return f"{words.get(method, method.lower())} {parts[0]}{where}"


def _namespace_of(target: Target) -> str:
    contexts, active = config.list_kube_config_contexts(target.kubeconfig)
    chosen = active
    if target.context is not None:
        chosen = next(each for each in contexts if each["name"] == target.context)
    return str(chosen["context"].get("namespace") or "default")


def _no_config(target: Target, error: Exception) -> str:
    where = target.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"no usable kubeconfig ({where}): {reason}; use --kubeconfig, --context or KUBECONFIG"
