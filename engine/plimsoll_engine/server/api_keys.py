"""Named API keys: who a request is from, and how much each name asked for.

In: settings, or one file, with lines ``name=key``. Out: the name a bearer token belongs to, and
counters by name. A key is kept as its SHA-256 alone and appears in no log, error or metric. This
module knows no model and no routes but the guarded prefix.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plimsoll_engine.config import ConfigError, EngineConfig, parse_api_keys
from plimsoll_engine.server.errors import ApiError, error_response

# The name of --api-key's, and of requests whose key is missing or wrong. No file may use them.
DEFAULT_NAME = "default"
UNKNOWN_NAME = "unknown"
MAX_KEYS_BYTES = 1 << 20


class ApiKeys:
    """Which name a bearer token belongs to."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys``: name to key."""
        self.names = tuple(keys)
        self._digests = {name: _digest(key.encode()) for name, key in keys.items()}

    def name_of(self, authorization: bytes) -> str | None:
        """``authorization`` is the header's value. Takes the same time whichever key it is."""
        scheme, _, token = authorization.partition(b" ")
        digest = _digest(token)
        found = [name for name, own in self._digests.items() if hmac.compare_digest(own, digest)]
        return found[0] if found and scheme.lower() == b"bearer" else None


def read_api_keys(config: EngineConfig) -> ApiKeys | None:
    """None: nobody is asked for a key. Raises ConfigError, without a key in it."""
    keys = dict(config.api_keys)
    if config.api_keys_file is not None:
        _add(keys, _read_file(config.api_keys_file), "--api-keys-file")
    if config.api_key is not None:
        _add(keys, {DEFAULT_NAME: config.api_key}, "--api-key")
    return ApiKeys(keys) if keys else None


def _read_file(path: Path) -> dict[str, str]:
    try:
        text = path.read_bytes()[:MAX_KEYS_BYTES].decode()
        return parse_api_keys(text)
    except OSError as error:
        raise ConfigError("--api-keys-file", path, f"a file to read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError("--api-keys-file", path, str(error)) from None


def _add(keys: dict[str, str], more: Mapping[str, str], source: str) -> None:
    for name, key in more.items():
        if name in keys:
            raise ConfigError(source, name, "a name that no other key has")
        if key in keys.values():
            raise ConfigError(source, name, "a key that no other name has")
        keys[name] = key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class KeyUse:
    """The counters of one name."""

    def __init__(self, counters: KeyMetrics, name: str) -> None:
        labels = (*counters.labels, name)
        self.requests = counters.requests.labels(*labels)
        self.prompt_tokens = counters.prompt_tokens.labels(*labels)
        self.generation_tokens = counters.generation_tokens.labels(*labels)
        self._refusals = counters.refusals
        self._labels = labels

    def refused(self, status: int) -> None:
        self._refusals.labels(*self._labels, str(status)).inc()


class KeyMetrics:
    """One series per name and counter: as many as there are keys, whatever clients send."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.labels = tuple(labels.values())
        names = (*labels, "api_key")
        self.requests = Counter(
            "plimsoll:api_key_requests",
            "Requests, by the name of their key.",
            names,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "plimsoll:api_key_prompt_tokens",
            "Prompt tokens of admitted requests, by the name of their key.",
            names,
            registry=registry,
        )
        self.generation_tokens = Counter(
            "plimsoll:api_key_generation_tokens",
            "Tokens generated, by the name of their key.",
            names,
            registry=registry,
        )
        self.refusals = Counter(
            "plimsoll:api_key_refusals",
            "Requests refused, by the name of their key and the HTTP status.",
            (*names, "code"),
            registry=registry,
        )


class KeyAuth:
    """Guards /v1/ alone: probes and scrapers have no key. Handlers find the name's counters as
    ``key_use`` in the scope."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: KeyMetrics) -> None:
        self._app = app
        self._keys = keys
        self._uses = {name: KeyUse(metrics, name) for name in (*keys.names, UNKNOWN_NAME)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        name = self._keys.name_of(dict(scope["headers"]).get(b"authorization", b""))
        use = self._uses[name or UNKNOWN_NAME]
        use.requests.inc()

        async def watch(message: Message) -> None:
            status = message.get("status", 200)
            # 499 is a client that left.
            if message["type"] == "http.response.start" and (400 <= status < 499 or status == 503):
                use.refused(status)
            await send(message)

        if name is None:
            error = ApiError(401, "The API key is missing or wrong")
            await error_response(error)(scope, receive, watch)
            return
        scope["key_use"] = use
        await self._app(scope, receive, watch)
