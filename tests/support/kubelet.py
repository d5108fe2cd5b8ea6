"""A kubelet that runs nothing: it writes the status that a test asks for into the pods.

In: a connection to a real API server, and for each image what becomes of a container with it.
Out: pods whose status looks as a kubelet's would. The StatefulSet controller makes the pods and
takes their readiness from here. A pod that is deleted is removed at once, as after a graceful stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Self

from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.api.core_v1_api import CoreV1Api
from kubernetes.aio.client.exceptions import ApiException

Json = dict[str, Any]
Behaviour = Callable[[Json], Json]

POLL_SECONDS = 0.1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running(pod: Json) -> Json:
    """Ready, with nothing to report."""
    return {"ready": True, "started": True, "state": {"running": {"startedAt": now()}}}


def starting(pod: Json) -> Json:
    """Runs, and its start-up is not over."""
    return {"ready": False, "started": False, "state": {"running": {"startedAt": now()}}}


def cannot_pull(pod: Json) -> Json:
    image = pod["spec"]["containers"][0]["image"]
    message = f'Back-off pulling image "{image}": not found'
    return {
        "ready": False,
        "started": False,
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": message}},
    }


def crashed(
    exit_code: int, message: str = "", reason: str = "Error", restarts: int = 1
) -> Behaviour:
    """Ended, and waits for its next try."""

    def behave(pod: Json) -> Json:
        end = {
            "exitCode": exit_code,
            "reason": reason,
            "message": message,
            "startedAt": now(),
            "finishedAt": now(),
        }
        return {
            "ready": False,
            "started": False,
            "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": end},
        }

    return behave


def succeeded(pod: Json) -> Json:
    """Ran to its end, as a Job's pod."""
    end = {"exitCode": 0, "reason": "Completed", "startedAt": now(), "finishedAt": now()}
    return {"ready": False, "started": False, "state": {"terminated": end}}


def recovered(exit_code: int, reason: str = "Error") -> Behaviour:
    """Serves again after one death."""

    def behave(pod: Json) -> Json:
        dead = crashed(exit_code, reason=reason)(pod)["lastState"]
        return {**running(pod), "restartCount": 1, "lastState": dead}

    return behave


class FakeKubelet:
    """``behaviours`` by image or container; ``default`` for the others. A pod's status is written when it
    appears and again when the behaviour of its image is set anew. ``address`` is every pod's."""

    def __init__(self, api: ApiClient, namespace: str, address: str = "192.0.2.1") -> None:
        self.address = address
        self._core, self._namespace = CoreV1Api(api), namespace
        self._behaviours: dict[str, Behaviour] = {}
        self._default: Behaviour = running
        self._written: dict[str, Behaviour] = {}
        self._task: asyncio.Task[None] | None = None

    def set(self, behaviour: Behaviour, of: str | None = None) -> None:
        """``of``: an image, or the name of a container."""
        if of is None:
            self._default = behaviour
        else:
            self._behaviours[of] = behaviour

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            listed = await self._core.list_namespaced_pod(self._namespace)
            for item in listed.items:
                pod: Json = self._core.api_client.sanitize_for_serialization(item)
                with contextlib.suppress(ApiException):  # it changed or went away meanwhile
                    await self._look_after(pod)
            await asyncio.sleep(POLL_SECONDS)

    async def _look_after(self, pod: Json) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if "deletionTimestamp" in pod["metadata"]:
            await self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)
            return
        container = pod["spec"]["containers"][0]
        behaviour = self._behaviours.get(container["name"]) or self._behaviours.get(
            container["image"], self._default
        )
        if self._written.get(uid) is behaviour:
            return
        state = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "restartCount": 0,
            "lastState": {},
            **behaviour(pod),
        }
        ready = "True" if state["ready"] else "False"
        status = {
            "phase": _phase(state["state"]),
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": [
                {"type": kind, "status": ready, "lastTransitionTime": now()}
                for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [state],
        }
        await self._core.patch_namespaced_pod_status(
            name,
            self._namespace,
            {"status": status},
            _content_type="application/merge-patch+json",
        )
        self._written[uid] = behaviour


def _phase(state: Json) -> str:
    if "running" in state:
        return "Running"
    return "Succeeded" if state.get("terminated", {}).get("exitCode") == 0 else "Pending"
