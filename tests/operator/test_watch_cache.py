"""The watch cache against a made-up cluster: what it answers while a watch works, dies, or is forbidden."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll_operator import names, watch_cache
from plimsoll_operator.cluster import ApiError, Cluster
from plimsoll_operator.resources import CONFIG_MAP, POD, SECRET, Resource
from plimsoll_operator.watch_cache import Caches, WatchCache
from plimsoll_operator.workers import Key

Json = dict[str, Any]
SELECTOR = names.label_selector(names.selector("assistant"))


def pod(name: str, version: int = 1, deployment: str = "assistant") -> Json:
    metadata = {
        "namespace": "team",
        "name": name,
        "resourceVersion": str(version),
        "labels": names.labels(deployment),
    }
    return {"metadata": metadata}


def event(kind: str, body: Json) -> Json:
    return {"type": kind, "object": body}


EXPIRED = event("ERROR", {"code": 410, "message": "too old resource version"})


class Scripted(Cluster):
    """Each list takes the next listing; each watch the next events, then ends, raises, or (None) stays
    silent for ever."""

    def __init__(
        self, listings: list[list[Json] | Exception], watches: list[list[Json | Exception | None]]
    ) -> None:
        self._listings, self._watches = iter(listings), iter(watches)
        self.asked: list[str] = []

    async def list_all(
        self, resource: Resource, namespace: str | None, label_selector: str = ""
    ) -> Json:
        self.asked.append("list")
        found = next(self._listings)
        if isinstance(found, Exception):
            raise found
        return {"metadata": {"resourceVersion": "10"}, "items": found}

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        label_selector: str,
        version: str,
        silent_seconds: float,
    ) -> AsyncIterator[Json]:
        self.asked.append(f"watch {version}")
        for each in next(self._watches):
            if each is None:
                await asyncio.Event().wait()
            elif isinstance(each, Exception):
                raise each
            else:
                yield each

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        self.asked.append(f"get {name}")
        return {"metadata": {"name": name}}

    async def find(self, resource: Resource, namespace: str, label_selector: str) -> list[Json]:
        self.asked.append("find")
        return []


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_cache, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(watch_cache, "RECONNECT_SECONDS", 0.0)


async def run(cluster: Scripted, resource: Resource = POD) -> tuple[WatchCache, list[Key]]:
    """The cache when its script has come to the silence."""
    changed: list[Key] = []
    cache = WatchCache(cluster, resource, None, changed.append)
    task = asyncio.create_task(cache.run())
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return cache, changed


def named(cache: WatchCache) -> list[tuple[str, str]]:
    found = cache.find("team", names.selector("assistant"))
    return [(each["metadata"]["name"], each["metadata"]["resourceVersion"]) for each in found]


CASES: dict[str, tuple[Scripted, list[tuple[str, str]], list[str]]] = {
    "events follow the list": (
        Scripted(
            [[pod("a-0"), pod("a-1")]],
            [
                [
                    event("MODIFIED", pod("a-0", 11)),
                    event("DELETED", pod("a-1", 12)),
                    event("ADDED", pod("a-2", 13)),
                    None,
                ]
            ],
        ),
        [("a-0", "11"), ("a-2", "13")],
        ["list", "watch 10"],
    ),
    "a silent watch is begun anew where it was": (
        Scripted([[pod("a-0")]], [[event("MODIFIED", pod("a-0", 11)), TimeoutError()], [None]]),
        [("a-0", "11")],
        ["list", "watch 10", "watch 11"],
    ),
    "so is one that the server ends, after a bookmark": (
        Scripted(
            [[pod("a-0")]],
            [[event("BOOKMARK", {"metadata": {"resourceVersion": "40"}})], [None]],
        ),
        [("a-0", "1")],
        ["list", "watch 10", "watch 40"],
    ),
    "what has gone while the version expired is gone": (
        Scripted([[pod("a-0"), pod("a-1")], [pod("a-0", 20)]], [[EXPIRED], [None]]),
        [("a-0", "20")],
        ["list", "watch 10", "list", "watch 10"],
    ),
    "a refused watch is listed again": (
        Scripted([[pod("a-0")], [pod("a-0", 20)]], [[ApiError(410, "Expired")], [None]]),
        [("a-0", "20")],
        ["list", "watch 10", "list", "watch 10"],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_cache_has_what_the_cluster_has(case: str) -> None:
    cluster, expected, asked = CASES[case]
    cache, _ = await run(cluster)
    assert named(cache) == expected
    assert cluster.asked == asked


async def test_a_child_that_vanished_unseen_is_told_of() -> None:
    cluster = Scripted([[pod("b-0", deployment="other")], []], [[EXPIRED], [None]])
    _, changed = await run(cluster)
    assert changed == [Key("team", "other")] * 2


async def test_a_reader_cannot_spoil_what_is_kept() -> None:
    cache, _ = await run(Scripted([[pod("a-0")]], [[None]]))
    first = cache.get("team", "a-0")
    assert first is not None
    first["metadata"].clear()
    assert named(cache) == [("a-0", "1")]


async def test_what_cannot_be_listed_is_read_in_the_cluster() -> None:
    cluster = Scripted([], [])
    caches = Caches(cluster, (), lambda key: None)
    assert await caches.get(CONFIG_MAP, "team", "limits") == {"metadata": {"name": "limits"}}
    assert await caches.find(POD, "team", SELECTOR) == []
    assert await caches.get(SECRET, "team", "control") == {"metadata": {"name": "control"}}
    assert cluster.asked == ["get limits", "find", "get control"]
